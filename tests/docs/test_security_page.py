"""docs/security.md has the tables of who may send what, as the code has them."""

from __future__ import annotations

import pytest

from kvd.core.access import table
from kvd.core.principals import KeyRole
from tests.docs.sources_harness import ROOT


@pytest.mark.parametrize("receiver", [KeyRole.SCHEDULER, KeyRole.SERVER])
def test_the_page_has_the_table_of_the_code(receiver: KeyRole) -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert f"\n\n{table(receiver)}\n\n" in page, f"put this into docs/security.md:\n\n{table(receiver)}"

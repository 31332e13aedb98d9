"""The page of error messages quotes texts that kvd has, and names every class of error."""

from __future__ import annotations

import difflib
import inspect
import re

import pytest

from kvd import errors
from kvd.node.daemon.exit_codes import exit_code_of
from tests.docs.sources_harness import ROOT, is_in_sources, texts

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES, CLASSES = PAGE.split("## The classes")
ROWS = re.findall(r"^\| (`.*?) \|", MESSAGES, re.MULTILINE)
QUOTED = [message for row in ROWS for message in re.findall(r"`([^`]+)`", row)]
ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.KvdError)]


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 50
    assert len(set(QUOTED)) == len(QUOTED), "a message is quoted twice"


@pytest.mark.parametrize("message", QUOTED)
def test_each_message_is_one_of_ours(message: str) -> None:
    """The words outside of "…" are in one text of the sources, in this order."""
    assert len(message.replace("…", "").strip()) > 10, "too short to be found"
    if not is_in_sources(message):
        plain = [text.replace("\0", "…") for text in texts()]
        pytest.fail(f"no text has {message!r}; the closest are {difflib.get_close_matches(message, plain, 3, 0.3)}")


@pytest.mark.parametrize("message", ["no scheduler replies at … after … s", "after … s no scheduler answers at …"])
def test_other_messages_are_not_found(message: str) -> None:
    assert not is_in_sources(message)


def test_each_class_that_is_explained_exists() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", CLASSES, re.MULTILINE)) <= {kind.__name__ for kind in ERRORS}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_each_class_of_error_is_explained(kind: type[errors.KvdError]) -> None:
    name = kind.__name__
    if kind is errors.KvdError:
        assert f"except kvd.{name}" in CLASSES
        return
    row = re.search(rf"^\| `{name}` \| .+ \| (\d) \|$", CLASSES, re.MULTILINE)
    assert row is not None, f"{name} is missing"
    error = kind.__new__(kind)
    assert int(row[1]) == exit_code_of(error), name
    for builtin in (ValueError, TypeError, KeyError, TimeoutError):
        if issubclass(kind, builtin) and not issubclass(kind, errors.GradientAnomaly):
            assert f"`{builtin.__name__}`" in row[0]
    attributes = re.findall(r"`\.(\w+)`", row[0])
    assert set(attributes) <= set(inspect.signature(kind.__init__).parameters), attributes

"""What the tests of the settings share: they find no file of this machine, and `refusal` gives the error of `load`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvd.config import load, sources
from kvd.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_files_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "FILES", (Path("kvd.toml"), tmp_path / "etc" / "kvd.toml"))


@pytest.fixture
def refusal() -> Callable[..., ConfigError]:
    """The error with which `load` refuses these overrides and variables."""

    def refuse(overrides: Mapping[str, object] = {}, environ: Mapping[str, str] = {}) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            load(overrides, environ=environ)
        return caught.value

    return refuse

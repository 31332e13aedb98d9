"""The API reference: it is built from the docstrings without a problem, and it finds the problems that there may be."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from docs.reference import build, checks, surface
from kvd.config import child_environment

ROOT = Path(__file__).resolve().parents[2]
BROKEN = '''
"""A module that refers to `Thing`, to `numpy.ndarray` and to ``anything``."""

__all__ = ["Thing", "fine", "silent", "wrong"]

class Thing:
    """A thing.

    Attributes:
        size: how large it is.
        weight: it has none.
    """

    size: int = 0
    colour: str = ""

def fine(value: int) -> int:
    """Gives `value` back, as `Thing.size` does. Text with `expression(inner)` introduces `inner`.

    Args:
        value: any.

    Raises:
        ValueError: never.
        As `wrong`.
    """
    return value

def silent() -> None:
    pass

def wrong(value: int) -> None:
    """See `nowhere`, `Thing.length` and :func:`kvd.core.machine.step`.

    Args:
        values: it is called differently.
        no colon

    Raises:
        NoSuchError: never.
    """
'''


class Built(NamedTuple):
    """The reference, and how its building ended."""

    folder: Path
    code: int
    said: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The reference as `make lint` builds it, in a process of its own: it replaces libraries that are not installed."""
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-m", "docs.reference.build", str(folder)]
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    return Built(folder, done.returncode, done.stdout + done.stderr)


@pytest.fixture
def pages(built: Built) -> Path:
    return built.folder


def test_no_docstring_has_a_problem(built: Built) -> None:
    assert built.code == 0, built.said


@pytest.mark.parametrize("name", surface.MODULES)
def test_every_public_name_is_on_a_page(pages: Path, name: str) -> None:
    page = (pages / f"{name.replace('.', '/')}.html").read_text(encoding="utf-8")
    errors = (pages / "kvd" / "errors.html").read_text(encoding="utf-8")
    exported = set(getattr(importlib.import_module(name), "__all__", ()))
    modules = {module.rpartition(".")[2] for module in surface.MODULES}
    missing = {entry for entry in exported - modules if f'id="{entry}"' not in page and f'id="{entry}"' not in errors}
    assert not missing


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("kvd.html", 'id="KVStore.job"'),  # inherited from a class that is not public
        ("kvd.html", 'href="kvd/errors.html#NodeLost"'),
        ("kvd.html", "KVD_SLICE_BYTES"),
        ("kvd.html", 'href="kvd/parallel.html"'),
        ("kvd/aio.html", 'id="KVStore.pushpull"'),
        ("kvd/parallel.html", 'id="JaxModel"'),
    ],
)
def test_what_a_page_has(pages: Path, page: str, text: str) -> None:
    assert text in (pages / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["Backend", "client/", 'id="Handle.on_end"', "::</"])
def test_internals_are_not_shown(pages: Path, text: str) -> None:
    for page in pages.rglob("*.html"):
        assert text not in page.read_text(encoding="utf-8"), page


def test_methods_of_both_stores_have_the_same_text() -> None:
    import kvd

    assert kvd.aio.KVStore.pull.__doc__ == kvd.KVStore.pull.__doc__
    assert kvd.aio.KVStore.__doc__ != kvd.KVStore.__doc__


def test_broken_docstrings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_docstrings.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = set(checks.problems(surface.load(["broken_docstrings"])))
    assert found == {
        "broken_docstrings.Thing: Attributes: there is no weight",
        "broken_docstrings.Thing.colour: has no docstring, and the class's does not describe it",
        "broken_docstrings.silent: has no docstring",
        "broken_docstrings.wrong: `nowhere` is nothing that the reference documents",
        "broken_docstrings.wrong: `Thing.length` is nothing that the reference documents",
        "broken_docstrings.wrong: `kvd.core.machine.step` is nothing that the reference documents",
        "broken_docstrings.wrong: Args: there is no values",
        "broken_docstrings.wrong: Args: expected NAME: TEXT, got 'no colon'",
        "broken_docstrings.wrong: Raises: there is no NoSuchError",
    }


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="x"><a href="#x"></a><a href="b.html#y"></a><a href="#z"></a>')
    (tmp_path / "b.html").write_text('<a href="https://example.org/#w"></a><a href="c.html"></a>')
    assert sorted(build.broken_links(tmp_path)) == [
        "a.html: the link #z leads nowhere",
        "a.html: the link b.html#y leads nowhere",
        "b.html: the link c.html leads nowhere",
    ]

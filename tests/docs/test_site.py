"""The site of the documentation: it is built without a warning, and broken docstrings and links are found."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag

import pytest

from docs.reference import checks, surface
from kvd.config import child_environment

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r'href="([^"]+)"')
SCRIPT = re.compile(r"<script.*?</script>", re.DOTALL)
TARGET = re.compile(r'id="([^"]+)"')
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
    """A folder with the site, and the result of its build."""

    folder: Path
    code: int
    said: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the site as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(folder)]
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    return Built(folder, done.returncode, done.stdout + done.stderr)


pytestmark = pytest.mark.timeout(600)


def page(built: Built, name: str) -> str:
    return (built.folder / f"{name}.html").read_text(encoding="utf-8")


def test_the_site_is_built_without_a_warning(built: Built) -> None:
    assert built.code == 0, built.said


def test_make_docs_builds_it_in_the_same_way() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "-m sphinx -q -W --keep-going -c docs . build/site" in makefile


def test_every_public_name_has_an_entry(built: Built) -> None:
    shown = "".join(page(built, f"docs/reference/{name}") for name in surface.MODULES)
    known = surface.Surface()
    for module_name, module in known.modules.items():
        for name, _ in known.exports(module):
            entry = f'id="{module_name}.{name}"'
            if module_name == "kvd.compat.byteps.torch" and name == "Compression":  # shown on Horovod's page
                entry = 'id="kvd.compat.horovod.torch.Compression"'
            assert entry in shown, entry


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kvd", 'id="kvd.KVStore.job"'),  # inherited from a class that is not public
        ("kvd", 'href="kvd.errors.html#kvd.errors.NodeLost"'),
        ("kvd", "KVD_SLICE_BYTES"),
        ("kvd", 'id="kvd.Config.slice_bytes"'),
        ("kvd.aio", 'id="kvd.aio.KVStore.pushpull"'),
        ("kvd.parallel", 'id="kvd.parallel.JaxModel"'),
        ("index", 'href="kvd.parallel.html"'),
    ],
)
def test_a_page_of_the_reference_has(built: Built, name: str, text: str) -> None:
    assert text in page(built, f"docs/reference/{name}")


@pytest.mark.parametrize("text", ["Backend", "StoreProperties", 'id="kvd.Handle.on_end"', "Alias for field", ">errno<"])
def test_the_reference_shows_no_internals(built: Built, text: str) -> None:
    for name in surface.MODULES:
        assert text not in page(built, f"docs/reference/{name}"), name


def test_every_link_of_the_site_leads_somewhere(built: Built) -> None:
    assert (built.folder / "index.html").is_file()
    assert not list(broken_links(built.folder))


def test_the_site_needs_nothing_from_elsewhere(built: Built) -> None:
    """Links may lead to other sites; scripts, styles and pictures may not come from there."""
    for path in built.folder.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)\b[^>]*?(?:src|href)="(https?:[^"]+)', path.read_text(encoding="utf-8")
        )
        assert not loaded, path


def broken_links(folder: Path) -> Iterator[str]:
    """Yield the links between the pages that have no target."""
    pages = {path.resolve(): SCRIPT.sub("", path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    targets = {path: set(TARGET.findall(text)) for path, text in pages.items()}
    for path, text in pages.items():
        for link in sorted(set(LINK.findall(text))):
            address, target = urldefrag(link)
            if ":" in address or path.name == "search.html":
                continue
            other = (path.parent / unquote(address).partition("?")[0]).resolve() if address else path
            if not other.exists() or (target and other in targets and target not in targets[other]):
                yield f"{path.relative_to(folder.resolve())}: the link {link} leads nowhere"


def test_methods_of_both_stores_have_the_same_text() -> None:
    import kvd

    assert kvd.aio.KVStore.pull.__doc__ == kvd.KVStore.pull.__doc__
    assert kvd.aio.KVStore.__doc__ != kvd.KVStore.__doc__


def test_broken_docstrings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_docstrings.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = set(checks.problems(surface.Surface(("broken_docstrings",))))
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
    assert sorted(broken_links(tmp_path)) == [
        "a.html: the link #z leads nowhere",
        "a.html: the link b.html#y leads nowhere",
        "b.html: the link c.html leads nowhere",
    ]

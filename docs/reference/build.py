"""Builds the API reference from the docstrings: ``python -m docs.reference.build FOLDER``.

Ends with 1 if a docstring of the public surface is missing or names what does not exist, if pdoc warns, or if a link
of a page leads nowhere.
"""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urldefrag

import pdoc.render
from pdoc.doc import Module

from docs.reference import checks, surface

_LINK = re.compile(r'href="([^"]+)"')
_SCRIPT = re.compile(r"<script.*?</script>", re.DOTALL)
_TARGET = re.compile(r'id="([^"]+)"')


def main(folder: Path) -> int:
    """Writes the pages into the folder, and the problems to stderr."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # such as a type in a signature that cannot be resolved
        surface.stand_in_for("jax", "numpy", "experimental")
        surface.stand_in_for("optax")
        modules = surface.load()
        found = list(checks.problems(modules))
        write(modules, folder)
    found += [f"pdoc: {str(warning.message).splitlines()[0]}" for warning in warned]
    found += broken_links(folder)
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{folder / 'index.html'}: {len(found)} problems" if found else folder / "index.html")
    return 1 if found else 0


def write(modules: dict[str, Module], folder: Path) -> None:
    """One page per module, and an index that leads to the first."""
    shutil.rmtree(folder, ignore_errors=True)
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"kvd {modules['kvd'].obj.__version__}")
    for name, module in modules.items():
        page = folder / f"{name.replace('.', '/')}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(pdoc.render.html_module(module, modules), encoding="utf-8")
    (folder / "index.html").write_text(pdoc.render.html_index(modules), encoding="utf-8")
    (folder / "search.js").write_text(pdoc.render.search_index(modules), encoding="utf-8")


def broken_links(folder: Path) -> Iterator[str]:
    """Links between the pages whose target is missing."""
    pages = {path.resolve(): _SCRIPT.sub("", path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    targets = {path: set(_TARGET.findall(text)) for path, text in pages.items()}
    for path, text in pages.items():
        for link in sorted(set(_LINK.findall(text))):
            address, target = urldefrag(link)
            if ":" in address:
                continue
            page = (path.parent / address).resolve() if address else path
            if page not in pages or (target and target not in targets[page]):
                yield f"{path.relative_to(folder.resolve())}: the link {link} leads nowhere"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

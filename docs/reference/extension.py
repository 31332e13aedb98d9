"""Sphinx extension for the pages of this folder: what autodoc shows of kvd, and warnings about broken docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.typing import ExtensionMetadata

import kvd.errors
from docs.reference import checks
from docs.reference.surface import INTERNAL, Surface, exported_names, is_internal, texts_of_settings

_PAGES = "docs/reference/"
_RAISES = re.compile(r"^Raises:\n(?:[ \t]+.*\n?|\n)+", re.MULTILINE)
_RAISED = re.compile(r"^( {4}(?! ))((?:\w+, )*\w+)(?=:)", re.MULTILINE)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Connect the extension to the events of the build."""
    surface = Surface()
    log = logging.getLogger(__name__)

    def check(app: Sphinx) -> None:
        for problem in checks.problems(surface):
            log.warning("%s", problem, type="docstring")

    def skip(app: Sphinx, what: str, name: str, value: Any, skipped: bool, options: object) -> bool | None:
        if what == "module":
            module = app.env.docname.removeprefix(_PAGES)
            shown = name in exported_names(surface.modules[module]) and surface.home_of(value, module) == module
            return None if shown else True
        return True if is_hidden(value) else None

    def prepare(app: Sphinx, what: str, name: str, value: Any, options: object, lines: list[str]) -> None:
        if name == "kvd.Config":
            for setting, text in texts_of_settings().items():
                lines += [
                    "",
                    f".. py:attribute:: {setting}",
                    f"   :type: {value.__annotations__[setting]}",
                    "",
                    f"   {text}",
                ]
        lines[:] = with_full_errors("\n".join(lines)).split("\n")

    def without_internals(app: Sphinx, name: str, value: Any, options: object, bases: list[type]) -> None:
        public = surface.classes()
        bases[:] = [
            base for base in bases if base in public or not (base is object or base.__module__.startswith("kvd."))
        ]

    def without_constructor(
        app: Sphinx, what: str, name: str, value: Any, options: object, arguments: str | None, returned: str | None
    ) -> tuple[str, str | None] | None:
        return ("", None) if isinstance(value, type) and is_internal(value, "__init__") else None

    app.connect("builder-inited", check)
    app.connect("autodoc-process-bases", without_internals)
    app.connect("autodoc-process-signature", without_constructor)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", prepare, priority=400)  # before napoleon reads the sections
    return {"parallel_read_safe": True}


def is_hidden(value: Any) -> bool:
    """Return whether a class member is not for programs, or is described in the docstring of its class alone."""
    function = value.fget if isinstance(value, property) else inspect.unwrap(value) if callable(value) else value
    owner, _, name = str(getattr(function, "__qualname__", "")).rpartition(".")
    if name in INTERNAL.get(owner.rpartition(".")[2], ()):
        return True
    if not str(getattr(function, "__module__", "kvd")).startswith("kvd"):
        return True  # inherited from a library
    return str(getattr(value, "__doc__", "")).startswith("Alias for field number")


def with_full_errors(docstring: str) -> str:
    """Return the docstring with the full names of kvd's errors below "Raises:", which makes them links."""
    errors = vars(kvd.errors)

    def full(match: re.Match[str]) -> str:
        names = [f"~kvd.errors.{name}" if name in errors else name for name in match[2].split(", ")]
        return match[1] + ", ".join(names)

    return _RAISES.sub(lambda section: _RAISED.sub(full, section[0]), docstring)

"""Public surface of kvd: the modules with a page in this folder, their exports, and the members for programs."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.pycode import ModuleAnalyzer

from kvd.config import all_settings

MODULES = tuple(sorted(page.stem for page in Path(__file__).parent.glob("kvd*.rst")))
"""The documented modules; what they export is public."""

INTERNAL = {
    "KVStore": {"__init__"},
    "Handle": {"__init__", "of", "on_end", "release_result", "claimed"},
    "Node": {"__init__"},
    "Config": {"check_role", "memory_bound_bytes", "slice_bytes_for", "environment"},
}
"""Members of public classes that only kvd itself calls: a store is made by `create`, a handle by a call."""

_ATTRIBUTE = re.compile(r"\bself\.(\w+)\b")


class Surface:
    """Documented modules, their exports and the members of the exported classes.

    Args:
        names: the modules to document.

    Attributes:
        modules: the imported modules by name.
    """

    def __init__(self, names: tuple[str, ...] = MODULES) -> None:
        self.modules = {name: importlib.import_module(name) for name in names}
        for module in self.modules.values():
            for name in getattr(module, "__all__", ()):
                setattr(module, name, getattr(module, name))  # some exports are imported on first use

    def exports(self, module: ModuleType) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each export that has its entry on the page of this module."""
        for name in exported_names(module):
            value = getattr(module, name)
            if not inspect.ismodule(value) and self.home_of(value, module.__name__) == module.__name__:
                yield name, value

    def home_of(self, value: object, module: str) -> str:
        """Return the documented module that defines a value; `module` if none does."""
        defined_in = getattr(value, "__module__", None)
        return defined_in if isinstance(defined_in, str) and defined_in in self.modules else module

    def classes(self) -> set[type]:
        """Return the exported classes of all modules."""
        return {
            value for module in self.modules.values() for _, value in self.exports(module) if isinstance(value, type)
        }

    def members(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield the name and definition of each public member of a class, except those of a documented base."""
        bases = set(kind.__mro__[1:]) & self.classes()
        for name in dir(kind):
            owner = next(base for base in kind.__mro__ if name in vars(base))
            if not name.startswith("_") and is_ours(owner) and owner not in bases and not is_internal(kind, name):
                yield name, vars(owner)[name]
        for name in inspect.get_annotations(kind):
            if not name.startswith("_") and not hasattr(kind, name):
                yield name, None


def exported_names(module: ModuleType) -> tuple[str, ...]:
    """Return `__all__`, or the public names that the module defines."""
    defined = (
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
    )
    return tuple(getattr(module, "__all__", defined))


def is_ours(kind: type) -> bool:
    """Return whether a class belongs to kvd rather than to Python or a library."""
    return kind.__module__.partition(".")[0] not in (
        "builtins",
        "typing",
        "enum",
        "torch",
        "abc",
        "collections",
        "numpy",
    )


def is_internal(kind: type, name: str) -> bool:
    """Return whether only kvd itself uses this member."""
    return name in INTERNAL.get(kind.__name__, ())


def docstring_of(kind: type, name: str, value: Any) -> str:
    """Return the docstring of a class member, inherited ones included: that of a field is the text below it."""
    if inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod):
        return inspect.getdoc(getattr(kind, name)) or ""
    for base in filter(is_ours, kind.__mro__):
        texts = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
        if text := texts.get((base.__qualname__, name)):
            return "\n".join(text)
    return ""


def parameters_of(value: Any) -> set[str]:
    """Return the parameter names of a function, or of a class's constructor."""
    try:
        return set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return set()


def attributes_of(kind: type) -> set[str]:
    """Return the members of a class and the attributes that its methods assign to `self`."""
    names = set(dir(kind))
    for base in kind.__mro__:
        names |= set(inspect.get_annotations(base))
        if base.__module__.partition(".")[0] == "kvd":
            names |= set(_ATTRIBUTE.findall(inspect.getsource(base)))
    return names


def texts_of_settings() -> dict[str, str]:
    """Return the description of every setting by its name."""
    texts = {}
    for setting in all_settings():
        values = "" if setting.accepted() == "text" else f" {_sentence(setting.accepted())}"
        texts[setting.name] = f"{_sentence(setting.help)}{values} (``{setting.flag}``, ``{setting.env}``)"
    return texts


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."

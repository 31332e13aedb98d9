"""Problems of public docstrings: missing ones, and names that do not exist."""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from docs.reference.surface import (
    Surface,
    attributes_of,
    docstring_of,
    exported_names,
    parameters_of,
    texts_of_settings,
)
from kvd.client.calls.backend import store_type
from kvd.errors import ConfigError

ELSEWHERE = ("cupy", "jax", "mx", "mxnet")
"""Libraries that docstrings name and that need not be installed here."""

_SECTION = re.compile(r"^(Args|Arguments|Attributes|Raises|Yields|Returns):\n((?:[ \t]+.*(?:\n|\Z)|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(?! )(.*)$", re.MULTILINE)
_ENTRY_NAMES = re.compile(r"((?:\*{0,2}[\w.`]+, )*\*{0,2}[\w.`]+):(?: |$)")
_REFERENCE = re.compile(r"(?<![`\w])`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`(?!`)")
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SENTENCE = re.compile(r"[A-Z]\w+ ")
_ROLE = re.compile(r":\w+:`~?([\w.]+)`")


def problems(surface: Surface) -> Iterator[str]:
    """Yield one line for each problem. It begins with the name whose docstring has the problem."""
    known = _Names(surface)
    for module_name, module in surface.modules.items():
        yield from _Docstring(module_name, module, inspect.getdoc(module) or "", known).problems()
        for name, value in surface.exports(module):
            fullname = f"{module_name}.{name}"
            if isinstance(value, type):
                yield from _class_problems(fullname, value, known, surface)
            elif inspect.isroutine(value):
                yield from _Docstring(fullname, value, inspect.getdoc(value) or "", known).problems()


def _class_problems(fullname: str, kind: type, known: _Names, surface: Surface) -> Iterator[str]:
    yield from _Docstring(fullname, kind, inspect.getdoc(kind) or "", known, kind).problems()
    described = " ".join(base.__doc__ or "" for base in kind.__mro__)
    for name, value in surface.members(kind):
        text = docstring_of(kind, name, value)
        if text or inspect.isroutine(value) or isinstance(value, classmethod | staticmethod):
            yield from _Docstring(f"{fullname}.{name}", getattr(kind, name), text, known, kind).problems()
        elif not re.search(rf"\b{name}\b", described) and name not in texts_of_settings():
            yield f"{fullname}.{name}: has no docstring, and the class's does not describe it"


def _names(entries: str) -> list[str]:
    """The names before the colons of a section's entries."""
    heads = [_ENTRY_NAMES.match(entry) for entry in _ENTRY.findall(entries)]
    return [name.strip("`*") for head in heads if head for name in head[1].split(", ")]


class _Names:
    """Names that a docstring may use anywhere.

    Attributes:
        words: the parameters and members of everything public, and the settings.
    """

    def __init__(self, surface: Surface) -> None:
        self._modules = surface.modules
        self.words = set(texts_of_settings())
        for module in surface.modules.values():
            for name, value in surface.exports(module):
                self.words |= {name, *parameters_of(value)}
                if isinstance(value, type):
                    self.words |= attributes_of(value)
                    for _, member in surface.members(value):
                        self.words |= parameters_of(member)

    def has(self, name: str) -> bool:
        """Return whether a reader can look the name up."""
        if name in self._modules:
            return True
        for module, shown in self._modules.items():
            head, _, rest = name.removeprefix(f"{module}.").partition(".")
            found = getattr(shown, head, None) if head in exported_names(shown) else None
            if isinstance(found, type):
                return not rest or rest.partition(".")[0] in attributes_of(found)
            if found is not None:
                return True
        head = name.partition(".")[0]
        if head in self.words or head in ELSEWHERE or _is_type(name):
            return True
        return head != "kvd" and _is_importable(name)

    def has_error(self, name: str) -> bool:
        """Return whether the name is a built-in error or one that kvd exports."""
        name = name.removeprefix("kvd.errors.")
        found = [getattr(module, name, None) for module in (*self._modules.values(), builtins)]
        return any(isinstance(kind, type) and issubclass(kind, BaseException) for kind in found)


class _Docstring:
    """One docstring, and the names that it may use.

    Args:
        owner: the class itself, or the class that has the member.
    """

    def __init__(self, fullname: str, value: Any, text: str, known: _Names, owner: type | None = None) -> None:
        self._fullname = fullname
        self._value = value
        self._text = text
        self._known = known
        self._owner = owner

    def problems(self) -> Iterator[str]:
        """Yield one line for each problem."""
        if not self._text:
            yield f"{self._fullname}: has no docstring"
        for section, entries in _SECTION.findall(self._text):
            for problem in self._section_problems(section, entries):
                yield f"{self._fullname}: {section}: {problem}"
        for name in sorted(set(_REFERENCE.findall(self._text) + _ROLE.findall(self._text)) - _own_words(self._text)):
            if not self._known.has(name):
                yield f"{self._fullname}: `{name}` is nothing that the reference documents"

    def _section_problems(self, section: str, entries: str) -> Iterator[str]:
        if section in ("Returns", "Yields"):
            return
        for entry in _ENTRY.findall(entries):
            if not _ENTRY_NAMES.match(entry) and not (section == "Raises" and _SENTENCE.match(entry)):
                yield f"expected NAME: TEXT, got {entry!r}"
        for name in _names(entries):
            if name not in self._allowed_in(section) and not (section == "Raises" and self._known.has_error(name)):
                yield f"there is no {name}"

    def _allowed_in(self, section: str) -> set[str]:
        if section == "Raises":
            return set()
        if section == "Attributes" and self._owner is not None:
            return attributes_of(self._owner)
        return parameters_of(self._value) | (parameters_of(self._owner) if self._owner is not None else set())


def _own_words(text: str) -> set[str]:
    """The names that an expression in the docstring introduces: those in `(gradient, weight)`."""
    expressions = [code for code in _CODE.findall(text) if not _REFERENCE.fullmatch(f"`{code}`")]
    return {word for code in expressions for word in re.findall(r"[A-Za-z_]\w*", code)}


def _is_type(name: str) -> bool:
    """Whether a store can have this type."""
    try:
        store_type(name)
    except ConfigError:
        return False
    return True


@functools.cache
def _is_importable(name: str) -> bool:
    """Whether it is a built-in name, or one of a library, such as ``numpy.ndarray``."""
    head, _, rest = name.partition(".")
    if hasattr(builtins, head):
        return True
    found: Any
    try:
        found = importlib.import_module(head)
    except ImportError:
        return False
    for part in rest.split("."):
        found = getattr(found, part, None)
    return found is not None

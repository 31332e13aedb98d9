"""What is wrong with the docstrings of the public surface: missing ones, and names that do not exist."""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pdoc.doc import Class, Doc, Function, Module

from docs.reference.surface import ERRORS, is_described_by_class, public_members, texts_of_settings
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
_ATTRIBUTE = re.compile(r"\bself\.(\w+)\b")


def problems(modules: Mapping[str, Module]) -> Iterator[str]:
    """One line for each problem, which begins with the name whose docstring has it."""
    known = _Names(modules)
    for module in modules.values():
        yield from _Docstring(module, known).problems()
        for member in public_members(module):
            yield from _Docstring(member, known).problems()
            if isinstance(member, Class):
                yield from _class_problems(member, known)


def _class_problems(shown: Class, known: _Names) -> Iterator[str]:
    for member in public_members(shown):
        if not (member.name == "__init__" and not member.docstring):
            yield from _Docstring(member, known, shown).problems()
    described = " ".join(kind.__doc__ or "" for kind in shown.obj.__mro__)
    for member in shown.own_members:
        if is_described_by_class(member) and not re.search(rf"\b{member.name}\b", described):
            yield f"{member.fullname}: has no docstring, and the class's does not describe it"


def _names(entries: str) -> list[str]:
    """The names before the colons of a section's entries."""
    heads = [_ENTRY_NAMES.match(entry) for entry in _ENTRY.findall(entries)]
    return [name.strip("`*") for head in heads if head for name in head[1].split(", ")]


class _Names:
    """What a name in a docstring may mean wherever it stands.

    Attributes:
        words: the parameters and members of everything public, and the settings.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = modules
        self.words = set(texts_of_settings())
        for module in modules.values():
            for member in public_members(module):
                self.words |= {member.name, *parameters_of(member)}
                if isinstance(member, Class):
                    self.words |= attributes_of(member.obj)
                    self.words |= {name for part in public_members(member) for name in parameters_of(part)}

    def has(self, name: str) -> bool:
        """Whether a reader can find out what the name means."""
        if name in self._modules:
            return True
        for module, shown in self._modules.items():
            head, _, rest = name.removeprefix(f"{module}.").partition(".")
            found = shown.get(head)
            if isinstance(found, Class):
                return not rest or rest.partition(".")[0] in attributes_of(found.obj)
            if found is not None:
                return True
        head = name.partition(".")[0]
        if head in self.words or head in ELSEWHERE or _is_type(name):
            return True
        return head != "kvd" and _is_importable(name)

    def has_error(self, name: str) -> bool:
        """Whether it is a built-in error, or one that kvd exports."""
        found = [
            shown.obj for module in self._modules.values() if (shown := module.get(name.removeprefix(f"{ERRORS}.")))
        ]
        return any(
            isinstance(kind, type) and issubclass(kind, BaseException)
            for kind in (*found, getattr(builtins, name, None))
        )


class _Docstring:
    """One docstring, and what the names in it may mean there.

    Args:
        owner: the class whose member has it.
    """

    def __init__(self, member: Doc[Any], known: _Names, owner: Class | None = None) -> None:
        self._member = member
        self._known = known
        self._owner = member if isinstance(member, Class) else owner

    def problems(self) -> Iterator[str]:
        text = self._member.docstring
        if not text:
            yield f"{self._member.fullname}: has no docstring"
        for section, entries in _SECTION.findall(text):
            for problem in self._section_problems(section, entries):
                yield f"{self._member.fullname}: {section}: {problem}"
        for name in sorted(set(_REFERENCE.findall(text) + _ROLE.findall(text)) - _own_words(text)):
            if not self._known.has(name):
                yield f"{self._member.fullname}: `{name}` is nothing that the reference documents"

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
            return attributes_of(self._owner.obj)
        return parameters_of(self._member) | (parameters_of(self._owner) if self._owner is not None else set())


def _own_words(text: str) -> set[str]:
    """The names that an expression in the docstring introduces: those in `(gradient, weight)`."""
    expressions = [code for code in _CODE.findall(text) if not _REFERENCE.fullmatch(f"`{code}`")]
    return {word for code in expressions for word in re.findall(r"[A-Za-z_]\w*", code)}


def parameters_of(member: Doc[Any]) -> set[str]:
    """Of a function, or of a class when it is made."""
    if isinstance(member, Function):
        return set(member.signature.parameters)
    init = member.members.get("__init__") if isinstance(member, Class) else None
    return set(init.signature_without_self.parameters) if isinstance(init, Function) else set()


@functools.cache
def attributes_of(kind: type) -> set[str]:
    """The members of a class, and what its methods assign to `self`."""
    names = set(dir(kind))
    for base in kind.__mro__:
        names |= set(vars(base).get("__annotations__", {}))
        if base.__module__.partition(".")[0] == "kvd":
            names |= set(_ATTRIBUTE.findall(inspect.getsource(base)))
    return names


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

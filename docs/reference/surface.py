"""The public surface of kvd as pdoc sees it: what a program may import, and nothing else."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, MutableSequence, Sequence
from typing import Any

from pdoc import doc_ast
from pdoc.doc import Class, Doc, Function, Module, Namespace, Variable

MODULES = (
    "kvd",
    "kvd.aio",
    "kvd.optimizer",
    "kvd.optimizer.schedule",
    "kvd.initializer",
    "kvd.errors",
    "kvd.parallel",
    "kvd.torch",
    "kvd.jax",
    "kvd.compat.horovod.torch",
    "kvd.compat.byteps.torch",
    "kvd.compat.mx",
)
"""The documented modules; what they export is public."""

OURS = {
    "kvd.KVStore": {"__init__"},
    "kvd.aio.KVStore": {"__init__"},
    "kvd.Handle": {"__init__", "of", "on_end", "release_result", "claimed"},
    "kvd.Node": {"__init__"},
    "kvd.Config": {"check_role", "memory_bound_bytes", "slice_bytes_for", "environment"},
}
"""Members of public classes that only kvd itself calls: a store is made by `create`, a handle by a call."""

ELSEWHERE = "@private: it is documented where it comes from"
BY_CLASS = "@private: the class's docstring describes it"
ERRORS = "kvd.errors"
_RAISES = re.compile(r"^Raises:\n(?:[ \t]+.*\n?|\n)+", re.MULTILINE)
_LITERAL = re.compile(r"(?<=\S):(?=:$)|^ *::$|(?<= )::$", re.MULTILINE)
_RAISED = re.compile(r"^( {4}(?! ))((?:\w+, )*\w+)(?=:)", re.MULTILINE)


class _NotInstalled(types.ModuleType):
    """Stands in for a library while a module that imports it is documented."""

    __path__: MutableSequence[str] = []  # noqa: RUF012  the type is that of the base

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def stand_in_for(library: str, *modules: str) -> None:
    """Lets imports of the library and of these modules of it succeed where it is not installed."""
    if importlib.util.find_spec(library) is None:
        for name in (library, *(f"{library}.{module}" for module in modules)):
            sys.modules[name] = _NotInstalled(name)


def load(names: Sequence[str] = MODULES) -> dict[str, Module]:
    """The modules with these names, shaped so that pdoc shows the public surface."""
    modules = {}
    for name in names:
        imported = importlib.import_module(name)
        for entry in getattr(imported, "__all__", ()):
            value = getattr(imported, entry)
            setattr(imported, entry, value)  # some are imported when they are first used
            if hasattr(value, "_fields"):  # a NamedTuple, whose constructor does not know where its types come from
                value.__new__.__annotations__.update(typing.get_type_hints(value))
        modules[name] = Module(imported)
    public = {member.obj for module in modules.values() for member in module.own_members if isinstance(member, Class)}
    for module in modules.values():
        _shape(module, modules, public)
    return modules


def public_members(space: Namespace[Any]) -> Iterator[Doc[Any]]:
    """What the page shows of a module or class."""
    for member in space.own_members:
        if "@private" not in member.docstring and (not member.name.startswith("_") or member.name == "__init__"):
            yield member


def is_described_by_class(member: Doc[Any]) -> bool:
    """Whether it is a public field without a docstring of its own."""
    return member.docstring == BY_CLASS and not member.name.startswith("_")


def _shape(module: Module, modules: dict[str, Module], public: set[type]) -> None:
    module.submodules = [other for name, other in modules.items() if name.rpartition(".")[0] == module.fullname]
    for member in module.own_members:
        if member.taken_from[0] in modules and member.taken_from[0] != module.fullname:
            member.docstring = ELSEWHERE
        elif isinstance(member, Class):
            _shape_class(member, public)
        elif isinstance(member, Variable) and not member.docstring:
            member.docstring = _docstring_of_variable(module, member.name)
        _to_markdown(member)
    _to_markdown(module)


def _shape_class(shown: Class, public: set[type]) -> None:
    """Shows what a class inherits from undocumented classes of kvd as its own, and hides what is not for programs."""
    documented = {f"{kind.__module__}.{kind.__qualname__}" for kind in public}
    for (module, name), members in shown.inherited_members.items():
        if module.partition(".")[0] == "kvd" and f"{module}.{name}" not in documented:
            shown.own_members = shown.own_members + [member for member in members if member.name != "__init__"]
    shown.bases = [
        base for base in shown.bases if base[0].partition(".")[0] != "kvd" or ".".join(base[:2]) in documented
    ]
    settings = texts_of_settings() if shown.fullname == "kvd.Config" else {}
    for member in shown.members.values():
        if member.name in OURS.get(shown.fullname, ()):
            member.docstring = "@private"
        elif _is_documented_by_base(member, shown.obj, public):
            member.docstring = ELSEWHERE
        elif member.name in settings:
            member.docstring = settings[member.name]
        elif isinstance(member, Variable) and (not member.docstring or member.docstring.startswith("Alias for field")):
            member.docstring = BY_CLASS
        _to_markdown(member)


def _is_documented_by_base(member: Doc[Any], kind: type, public: set[type]) -> bool:
    """Whether it is what a documented base has, or does what the base's docstring says."""
    if member.name.startswith("_") or (
        isinstance(member, Function) and getattr(vars(kind).get(member.name), "__doc__", None)
    ):
        return False
    return any(hasattr(base, member.name) for base in kind.__mro__[1:] if base in public)


def _docstring_of_variable(module: Module, name: str) -> str:
    """The string below the variable in the file from which the module imports it."""
    for node in ast.walk(ast.parse(inspect.getsource(module.obj))):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return doc_ast.walk_tree(importlib.import_module(node.module)).var_docstrings.get(name, "")
    return ""


def texts_of_settings() -> dict[str, str]:
    """Name → text, of every setting: its help is declared with it."""
    from kvd.config import all_settings

    texts = {}
    for setting in all_settings():
        values = "" if setting.accepted() == "text" else f" {_sentence(setting.accepted())}"
        texts[setting.name] = f"{_sentence(setting.help)}{values} (``{setting.flag}``, ``{setting.env}``)"
    return texts


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _to_markdown(member: Doc[Any]) -> None:
    """Names the errors of "Raises:" in full, so that pdoc links them, and drops the ``::`` before blocks of code."""
    errors = vars(sys.modules[ERRORS])

    def link(match: re.Match[str]) -> str:
        names = [f"`{ERRORS}.{name}`" if name in errors else name for name in match[2].split(", ")]
        return match[1] + ", ".join(names)

    text = _RAISES.sub(lambda section: _RAISED.sub(link, section[0]), member.docstring)
    member.docstring = _LITERAL.sub("", text)

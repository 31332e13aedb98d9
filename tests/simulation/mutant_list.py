"""List of all mutants: the broken builds of `tests/simulation`, read from its sources without running them.

A mutant is a function or lambda that sets attributes by a `pytest.MonkeyPatch` which it is given and returns nothing.
Its name is that of the function, or its key in a dictionary. A mutant whose place in the code has moved keeps its name.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

PATCH_NAMES: Final = ("patch", "monkeypatch")


class Mutant(NamedTuple):
    """A broken build.

    Attributes:
        file: the name of the file in `tests/simulation`.
        uses: how often its file names it apart from its definition: a mutant that nothing uses is not tested.
        targets: what it replaces, in order.
        meaning: the first line of its docstring.
    """

    name: str
    file: str
    uses: int
    targets: tuple[str, ...]
    meaning: str


def mutants_of(tree: Path) -> list[Mutant]:
    """Return the mutants of a tree."""
    files = sorted((tree / "tests" / "simulation").glob("test_*.py"))
    return [mutant for file in files for mutant in _in_file(file)]


def _in_file(file: Path) -> Iterator[Mutant]:
    module = ast.parse(file.read_text(encoding="utf-8"))
    loaded = Counter(node.id for node in ast.walk(module) if isinstance(node, ast.Name))
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and _may_be_one(node):
            targets = _targets(node)
            if targets:
                is_test = node.name.startswith("test_")
                meaning = (ast.get_docstring(node) or "").split("\n")[0]
                yield Mutant(node.name, file.name, 1 if is_test else loaded[node.name], targets, meaning)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                targets = _targets(value) if isinstance(value, ast.Lambda) else ()
                if targets and isinstance(key, ast.Constant):
                    yield Mutant(str(key.value), file.name, 1, targets, "")


def _may_be_one(function: ast.FunctionDef) -> bool:
    return (
        not function.name.startswith("__")
        and isinstance(function.returns, ast.Constant)
        and function.returns.value is None
    )


def _targets(function: ast.FunctionDef | ast.Lambda) -> tuple[str, ...]:
    """Return what the function sets with a patch that it is given."""
    given = {argument.arg for argument in function.args.args} & set(PATCH_NAMES)
    return tuple(
        ".".join(
            ast.unparse(argument).strip("'") for argument in (call.args[:2] if len(call.args) > 2 else call.args[:1])
        )
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "setattr"
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in given
    )


def compare_mutants(base: Path, new: Path, say: Callable[[str], None]) -> int:
    """List the mutants of `new` and return how many of `base` are dropped or less used."""
    earlier, later = mutants_of(base), mutants_of(new)
    for mutant in later:
        say(f"{mutant.file}: {mutant.name} [{mutant.uses}]: {', '.join(mutant.targets)}")
    before = _uses(earlier)
    after = _uses(later)
    fewer = {name: (uses, after[name]) for name, uses in before.items() if after[name] < uses}
    places = {mutant.name: mutant.targets for mutant in later}
    for mutant in earlier:
        if mutant.name in places and places[mutant.name] != mutant.targets:
            say(f"moved: {mutant.name}: {', '.join(mutant.targets)} → {', '.join(places[mutant.name])}")
    for name, (was, is_now) in fewer.items():
        say(f"{'fewer uses' if is_now else 'DROPPED'}: {name}: {was} → {is_now}")
    say(f"{len(later)} mutants, {len(earlier)} in the base; {len(fewer)} dropped or less used")
    return len(fewer)


def _uses(mutants: list[Mutant]) -> Counter[str]:
    uses: Counter[str] = Counter()
    for mutant in mutants:
        uses[mutant.name] += mutant.uses
    return uses

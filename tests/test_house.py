"""Rules that no other tool checks: import circles, the wall clock, and names in the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"kvd": ROOT / "kvd", "kvd_cli": ROOT / "cli" / "kvd_cli"}
WALL_CLOCK = {
    "time.time",
    "time.time_ns",
    "time.gmtime",
    "time.localtime",
    "time.strftime",
    "time.ctime",
    "time.clock_gettime",
    "time.CLOCK_REALTIME",
    "from time",
    "from datetime",
    "datetime",
}
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_the_wall_clock_is_read_for_people_only() -> None:
    """It may jump; what waits, expires or is ordered goes by the monotonic clock.

    The log shows the time. Status reports have that of each host: clocks are compared, and snapshots have an age.
    """
    readers = set()
    for path in python_files("kvd", "cli"):
        for node in ast.walk(tree_of(path)):
            used: list[str | None] = []
            if isinstance(node, ast.Attribute):
                used = [ast.unparse(node)]
            elif isinstance(node, ast.ImportFrom):
                used = [node.module and f"from {node.module}"]
            elif isinstance(node, ast.Import):
                used = [name.name for name in node.names]
            if not WALL_CLOCK.isdisjoint(used):
                readers.add(str(path.relative_to(ROOT)))
    assert readers == {"kvd/observe/log.py", "kvd/node/daemon/facts.py"}


# ── imports ──


@cache
def modules() -> dict[str, Path]:
    """Name → file, of every module."""
    found = {}
    for package, root in SOURCES.items():
        for path in root.rglob("*.py"):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path) -> Iterator[str]:
    """The modules that a file imports, at any level."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules() else node.module


def circle_from(start: str, graph: dict[str, set[str]]) -> list[str]:
    """The shortest way from a module back to itself; empty if there is none."""
    came_from: dict[str, str] = {}
    queue = [start]
    for name in queue:
        for other in sorted(graph[name]):
            if other == start:
                way = [start, name]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if other not in came_from:
                came_from[other] = name
                queue.append(other)
    return []


def test_no_import_circle() -> None:
    """Imports in functions and for type checkers count, too: they tie two files together as well."""
    graph = {name: {other for other in imports_of(path) if other in modules()} for name, path in modules().items()}
    circles = [" → ".join(circle) for name in graph if (circle := circle_from(name, graph))]
    assert not circles


def test_the_check_finds_a_circle() -> None:
    assert circle_from("a", {"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert circle_from("a", {"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


# ── the documentation ──


@cache
def definitions(path: Path) -> set[str]:
    """The functions and classes of a file; methods as Class.method."""
    names = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{entry.name}" for entry in node.body if hasattr(entry, "name")}
    return names


def steps() -> list[tuple[str, str]]:
    """Every `file.py:function` in the description of the architecture; the file is below kvd/."""
    return re.findall(r"`([a-z0-9_/]+\.py):([A-Za-z0-9_.]+)`", ARCHITECTURE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "function"), sorted(set(steps())))
def test_the_architecture_names_functions_that_exist(file: str, function: str) -> None:
    path = ROOT / "kvd" / file
    assert path.is_file(), f"docs/architecture.md names kvd/{file}"
    assert function in definitions(path), f"docs/architecture.md names {function} in kvd/{file}"


def test_the_architecture_tells_the_four_walks() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    for title in ("The way of a push", "The way of a pull", "The way of a worker's death", "The way of a gradient"):
        section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None, title
        walk = re.findall(r"`([a-z0-9_/]+\.py):", section[1])
        assert len(walk) >= 8, title

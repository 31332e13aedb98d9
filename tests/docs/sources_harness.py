"""The texts in the sources, with a mark in place of what is filled in."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILLED_IN = "\0"


@functools.cache
def texts() -> tuple[str, ...]:
    """Every text in the sources of kvd and its command line, except docstrings."""
    found = []
    for folder in ("kvd", "cli/kvd_cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += _texts_of(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(dict.fromkeys(found))


def _texts_of(tree: ast.Module) -> list[str]:
    parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in ast.walk(node)}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            values = [value.value if isinstance(value, ast.Constant) else FILLED_IN for value in node.values]
            found.append("".join(map(str, values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append(node.value)
    return found


def is_in_sources(message: str) -> bool:
    """Whether a text in the sources has this message in it, where "…" stands for something that is filled in."""
    pattern = re.compile(".{0,200}?".join(re.escape(part) for part in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in texts())

"""Optimizers of the servers in ``kvd status``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

import kvd.optimizer

_MOST_ENTRIES = 3  # of a mapping, in a line


def optimizer_rows(servers: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """Return a row for each optimizer with its servers: one row, unless the optimizer is just changing."""
    ranks: dict[str, list[str]] = {}
    for server in servers:
        if server.get("optimizer"):
            ranks.setdefault(optimizer_text(server["optimizer"]), []).append(str(server["rank"]))
    return [[text, ", ".join(which)] for text, which in ranks.items()]


def optimizer_text(optimizer: Any) -> str:
    """Return an optimizer as a program writes it, such as ``SGD(learning_rate=0.1)``, without defaults.

    Its parts came over the network, so they may be anything.
    """
    match optimizer:
        case [str() as name, {**fields}] | ["schedule", str() as name, {**fields}]:
            usual = _defaults_of(name)
            said = {field: value for field, value in fields.items() if field not in usual or usual[field] != value}
            return f"{name}({', '.join(f'{field}={optimizer_text(value)}' for field, value in said.items())})"
        case {**entries} if len(entries) > _MOST_ENTRIES:  # ``-o json`` has them
            return f"{len(entries)} entries"
    return str(optimizer)


def _defaults_of(name: str) -> dict[str, Any]:
    """Return the default of each field of the named optimizer; empty if there is none."""
    kind = getattr(kvd.optimizer, name, None)
    if not isinstance(kind, type) or not is_dataclass(kind):
        return {}
    return {field.name: field.default for field in fields_of(kind)}

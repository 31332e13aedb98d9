"""Words of a script as values."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from tests.simulator.settings import ClusterSettings


def seconds_of(word: str) -> float:
    """`5s` → 5.0."""
    return float(word.removesuffix("s"))


def changed(cluster: ClusterSettings, words: list[str]) -> ClusterSettings:
    """A cluster with other settings: `name=value` for fields of its own, of its timeouts and of its shell."""
    for word in words:
        name, value = word.split("=")
        for part in ("timeouts", "shell"):
            settings = getattr(cluster, part)
            if _has(settings, name):
                cluster = replace(cluster, **{part: _with(settings, name, value)})
                break
        else:
            cluster = _with(cluster, name, value)
    return cluster


def _has(settings: Any, name: str) -> bool:
    return any(field.name == name for field in fields(settings))


def _with(settings: Any, name: str, value: str) -> Any:
    kind = type(getattr(settings, name))
    return replace(settings, **{name: value == "true" if kind is bool else kind(value)})

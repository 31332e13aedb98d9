"""Differences between the nodes of a cluster in settings, versions and clocks, from its status."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvd_cli.copies import Report
from kvd_cli.output import lasting

CLOCKS_APART_S: Final = 2.0
"""How far clocks may be apart, besides what cannot be measured."""

_THIS_HOST: Final = "this host"


def disagreements(report: Report) -> list[str]:
    """Return a line for each setting, version or clock that differs."""
    nodes = {"the scheduler": report}
    nodes.update({f"server {server['rank']}": server for server in report.get("servers", ()) if "error" not in server})
    return [*_settings(nodes), *_versions(nodes), *_clocks(nodes)]


def _settings(nodes: dict[str, Report]) -> Iterator[str]:
    names = dict.fromkeys(name for node in nodes.values() for name in node.get("process_settings", {}))
    for name in names:
        values = _by_value({node: found.get("process_settings", {}).get(name) for node, found in nodes.items()})
        if len(values) > 1:
            yield (
                f"settings: {name} is {_compared(values)}. Start all nodes with the same value unless that is meant; "
                "kvd config show --origin says where a host has it from."
            )


def _versions(nodes: dict[str, Report]) -> Iterator[str]:
    for name, title in (("version", "kvd"), ("numpy", "NumPy")):
        values = _by_value({node: found.get(name) for node, found in nodes.items()})
        if len(values) > 1:
            yield f"versions: {title} is {_compared(values)}. Install the same on all hosts: results may differ."


def _by_value(of_nodes: dict[str, str | None]) -> dict[str, list[str]]:
    """Group the nodes by value, without those that have none."""
    values: dict[str, list[str]] = {}
    for node, value in of_nodes.items():
        if value is not None:
            values.setdefault(value, []).append(node)
    return values


def _compared(values: dict[str, list[str]]) -> str:
    return ", and ".join(f"{value or 'empty'} at {', '.join(nodes)}" for value, nodes in values.items())


def _clocks(nodes: dict[str, Report]) -> Iterator[str]:
    """Return a line for each clock that differs from the scheduler's."""
    reference = nodes["the scheduler"].get("clock")
    if reference is None:
        return
    others = {name: node["clock"] for name, node in nodes.items() if "clock" in node}
    for name, clock in {**others, _THIS_HOST: {"ahead_s": 0.0, "error_s": 0.0}}.items():
        apart_s = clock["ahead_s"] - reference["ahead_s"]
        if abs(apart_s) > CLOCKS_APART_S + clock["error_s"] + reference["error_s"]:
            yield (
                f"clock: that of {name} is {lasting(abs(apart_s))} {'ahead of' if apart_s > 0 else 'behind'} the "
                "scheduler's, so log lines do not line up; nothing else depends on it. Let both hosts follow a time "
                "server (timedatectl set-ntp true, chronyc tracking)."
            )

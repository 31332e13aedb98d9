"""The agreement: the settings that all nodes of a cluster share, and whether a Join agrees with them."""

from __future__ import annotations

from kvd.protocol.messages import MAX_MEMBERS, ErrorCode, Join, Refused, Settings

NODES = ("server", "worker")
ROLES = (*NODES, "observer")
MODES = ("", "sync", "async")
MERGES = ("", "sum", "mean", "weighted")


class Agreement:
    """The cluster's settings. A mode or merge that the scheduler was not told stays open until a worker decides it."""

    def __init__(self, told: Settings, earlier: Settings | None = None) -> None:
        """`earlier` are the settings of the scheduler before, which decide what this one was not told."""
        self.settings = told
        if earlier is not None:
            self.adopt_mode(earlier)
            self.adopt_merge(earlier)

    def objection(self, join: Join) -> Refused | None:
        """Why this Join cannot be accepted: it is malformed, or its settings differ from the cluster's."""
        malformed = malformation(join)
        if malformed is not None:
            return malformed
        size = self.settings.num_workers + self.settings.num_servers
        if size > MAX_MEMBERS:
            return _objection(join, "num_workers", f"a cluster has at most {MAX_MEMBERS} nodes in all, not {size}")
        for field, wanted, have in zip(Settings._fields, join.settings, self.settings, strict=True):
            if not self._agrees(field, wanted, have):
                text = (
                    f"this node wants {field}={wanted!r}, the cluster has {have!r}: start it with the cluster's setting"
                )
                return _objection(join, field, text)
        return None

    def adopt_mode(self, wanted: Settings) -> bool:
        """Takes mode and staleness from a worker that says them first; True if that changed the settings."""
        if self.settings.mode != "" or wanted.mode == "":
            return False
        self.settings = self.settings._replace(mode=wanted.mode, staleness=wanted.staleness)
        return True

    def adopt_merge(self, wanted: Settings) -> bool:
        """Takes the merge rule from a worker that says it first; True if that changed the settings."""
        if self.settings.merge != "" or wanted.merge == "":
            return False
        self.settings = self.settings._replace(merge=wanted.merge)
        return True

    def _agrees(self, field: str, wanted: object, have: object) -> bool:
        if field == "staleness":  # -1 is both "unbounded" and "as the cluster has it"; the mode decides it
            return wanted in (-1, have) or self.settings.mode == ""
        unset = type(wanted)()
        return wanted in (unset, have) or have == unset


def malformation(join: Join) -> Refused | None:
    """Why this Join could not be accepted anywhere."""
    if join.role not in ROLES:
        return _objection(join, "role", f"a node joins as server, worker or observer, not {join.role!r}")
    if join.role != "observer" and not join.node_id:
        return _objection(join, "node_id", "a node needs a node_id")
    for field, word, words in (("mode", join.settings.mode, MODES), ("merge", join.settings.merge, MERGES)):
        if word not in words:
            return _objection(join, field, f"{field} is {' or '.join(words[1:])}, not {word!r}")
    for field, size in (("num_workers", join.settings.num_workers), ("num_servers", join.settings.num_servers)):
        if size > MAX_MEMBERS:
            return _objection(join, field, f"{field} is at most {MAX_MEMBERS}, not {size}")
    return None


def _objection(join: Join, field: str, text: str) -> Refused:
    return Refused(join.request, ErrorCode.CONFIG_ERROR, text, key=field)

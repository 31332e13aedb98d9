"""What has changed between views: a node that knows an earlier one is sent the difference, anyone else all of it."""

from __future__ import annotations

from collections import OrderedDict

from kvd.core.pseudonyms import public_member
from kvd.protocol.messages import Member, NodeName, Partition, RunEntry, View, ViewChange

PAGE_BYTES = 40 << 10  # of the 64 KiB of a header, for the members of one message
MAX_LEFT = 1024  # places that were given back, remembered
MAX_TOLD = 64  # answers to nodes that know different views: a node says which it knows
MEMBER_BYTES = 80  # of a member in a message, without its texts: as msgpack, numbers and the lengths of texts at most
RUN_BYTES = 32  # of a run, without its texts

Place = tuple[str, int]
Told = tuple[View, ...] | tuple[ViewChange, ...]


class ViewHistory:
    """The newest view that was announced, and for each of its parts the number of the view that brought it.

    `change` counts the views. Settings and shards hardly ever change: then everyone is sent the whole view.
    """

    def __init__(self, view: View, change: int) -> None:
        self._view = view
        self._public: View | None = None  # for all but servers; made when it is asked for
        self._change = change
        self._reaches_back_to = change  # who knows an earlier view is sent all of this one
        self._members: OrderedDict[Place, tuple[Member, int]] = OrderedDict()  # the latest change last
        self._pseudonymous: dict[Place, Member] = {}
        self._left: OrderedDict[Place, int] = OrderedDict()  # the latest last
        self._partitions_since = [change] * len(view.partitions)
        self._runs_since = change
        self._known: dict[tuple[bool, int], Told] = {}  # what was made of this view: by whether for servers, and base
        self._take_members(view, change)

    @property
    def newest(self) -> View:
        """As servers are told of it."""
        return self._view

    @property
    def public(self) -> View:
        """As all others are."""
        if self._public is None:
            members = tuple([self._pseudonymous[member.role, member.rank] for member in self._view.members])
            self._public = View(self._view.settings, members, self._view.shards, (), self._view.partitions)
        return self._public

    def add(self, view: View, change: int) -> None:
        """This view, with this number, is the newest one."""
        before, self._view, self._public, self._change = self._view, view, None, change
        self._known = {}
        if (view.settings, view.shards) != (before.settings, before.shards):
            self._reaches_back_to = change
        self._take_partitions(before.partitions, view.partitions, change)
        if view.runs != before.runs:
            self._runs_since = change
        self._take_members(view, change)

    def told(self, base: int | None, *, to_servers: bool) -> Told:
        """The messages for a node that knows the view of this number; None: none of these views."""
        base = -1 if base is None or base < self._reaches_back_to else min(base, self._change)
        found = self._known.get((to_servers, base))
        if found is None:
            whole = self._view if to_servers else self.public
            change = None if base < 0 else self._since(base, to_servers=to_servers)
            found = pages(whole) if change is None else (change,)
            if len(self._known) >= MAX_TOLD:
                self._known.clear()
            self._known[to_servers, base] = found
        return found

    def _take_members(self, view: View, change: int) -> None:
        for member in view.members:
            place = member.role, member.rank
            known = self._members.get(place)
            if known is None or (known[0] is not member and known[0] != member):
                self._members[place] = member, change
                self._members.move_to_end(place)
                self._pseudonymous[place] = public_member(member)
                self._left.pop(place, None)
        if len(self._members) > len(view.members):
            there = {(member.role, member.rank) for member in view.members}
            for place in [place for place in self._members if place not in there]:
                del self._members[place], self._pseudonymous[place]
                self._left[place] = change
                if len(self._left) > MAX_LEFT:
                    _, forgotten = self._left.popitem(last=False)
                    self._reaches_back_to = max(self._reaches_back_to, forgotten)

    def _take_partitions(self, before: tuple[Partition, ...], after: tuple[Partition, ...], change: int) -> None:
        if len(before) != len(after):
            self._reaches_back_to = change
            self._partitions_since = [change] * len(after)
            return
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                self._partitions_since[number] = change

    def _since(self, base: int, *, to_servers: bool) -> ViewChange | None:
        """None: it would not be much shorter than the whole view, or too long for a message."""
        has_runs = self._runs_since > base and to_servers
        members: list[Member] = []
        nbytes = sum([run_nbytes(run) for run in self._view.runs]) if has_runs else 0
        for place in reversed(self._members):
            member, change = self._members[place]
            if change <= base:
                break
            members.append(member if to_servers else self._pseudonymous[place])
            nbytes += member_nbytes(member)
            if nbytes > PAGE_BYTES:
                return None
        members.reverse()
        left = tuple([NodeName(*place) for place, change in self._left.items() if change > base])
        partitions = tuple(
            [
                (number, entry)
                for number, entry in enumerate(self._view.partitions)
                if self._partitions_since[number] > base
            ]
        )
        runs = self._view.runs if has_runs else ()
        return ViewChange(base, tuple(members), left, partitions, has_runs, runs)


def pages(view: View) -> tuple[View, ...]:
    """The view in messages that are short enough. The first one has all but members if there are several."""
    parts: list[list[Member]] = [[]]
    nbytes = 0
    for member in view.members:
        own = member_nbytes(member)
        if nbytes + own > PAGE_BYTES:
            parts.append([])
            nbytes = 0
        parts[-1].append(member)
        nbytes += own
    if len(parts) == 1 and nbytes <= PAGE_BYTES // 4:
        return (view,)
    count = len(parts) + 1
    first = View(view.settings, (), view.shards, view.runs, view.partitions, 0, count)
    rest = [View(view.settings, tuple(part), (), (), (), page, count) for page, part in enumerate(parts, 1)]
    return (first, *rest)


def member_nbytes(member: Member) -> int:
    """What a member takes in a message, at most."""
    texts = member.node_id, member.address, member.reason, member.key, member.principal
    return MEMBER_BYTES + sum([len(text.encode()) for text in texts])


def run_nbytes(run: RunEntry) -> int:
    """What a run takes in a message, at most."""
    return RUN_BYTES + len(run.job.encode()) + len(run.token.encode())

"""Pushes and pulls: a call becomes messages, one per full slice, many small ones together; answers become copies."""

from __future__ import annotations

from functools import partial

from kvd import errors
from kvd.core import calls
from kvd.core.machine import Copy, Received, Span
from kvd.core.outbox import Entry
from kvd.core.session import SchedulerLink
from kvd.core.workercalls import Call, WorkerSettings
from kvd.core.workerkeys import Packing, WorkerKey, packings
from kvd.core.workerturns import KeyTurns
from kvd.errors import KvdError, NodeLost, NotAllowed
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    DeclarePack,
    Done,
    Part,
    Pull,
    PullPack,
    Push,
    PushPack,
    Refused,
    Values,
)

MAX_PLANS = 256


class Moves(KeyTurns):
    """The data side of a worker."""

    def __init__(self, settings: WorkerSettings, link: SchedulerLink) -> None:
        super().__init__(settings, link)
        self._last_pack = 0

    def _move_error(self, call: Call, move: calls.Move) -> KvdError | None:
        if move.push and self._observer:
            return NotAllowed("an observer does not push: join as a worker")
        if move.push and self._left_rounds:
            return NotAllowed("this worker has left the rounds (join or close): it pushes no more")
        if move.push and len(set(call.keys)) < len(call.keys):
            names = [key.name for key in call.keys]
            twice = next(name for name in names if names.count(name) > 1)
            return NotAllowed(f"key {twice!r} is pushed twice in one call: add the values first", key=twice)
        for key, item in zip(call.keys, move.items, strict=True):
            spec = item.spec
            if spec is None or spec is key.fits:
                continue
            assert key.spec is not None
            try:
                key.spec.check_same(spec, key.name)
            except (errors.ShapeMismatch, errors.DtypeMismatch) as error:
                return error
            key.fits = spec
        return None

    def _move(self, call: Call, move: calls.Move) -> None:
        """Gives every item its clock, and puts the messages of the call into the outbox."""
        call.result = [None] * len(move.items)
        newest = self._observer or self._left_rounds or move.any_version
        exact = move.pull and self.view.settings.mode != "async"
        if move.push:
            for key in call.keys:
                key.clock += 1
                key.open_pushes += 1
        if move.push or not newest:
            clocks = [key.clock for key in call.keys]
            if exact:
                call.pulls = list(zip(call.keys, clocks, strict=True))
                for key, clock in call.pulls:
                    key.pulling.append(clock)
        else:
            clocks = [ANY_CLOCK] * len(call.keys)
        plan = self._plan(call.keys)
        call.remaining = call.messages = len(plan)
        call.unsettled = len(plan) if move.push else 0
        shared = clocks[0] if clocks and clocks.count(clocks[0]) == len(clocks) else None
        for packing in plan:
            if shared is None or not self._is_pack(packing, move):
                self._send_parts(call, move, packing, clocks)
            else:
                self._send_pack(call, move, packing, shared)
        if not plan:
            self._complete(call, call.result)

    def _plan(self, keys: list[WorkerKey]) -> list[Packing]:
        """How a call on these keys is cut: worked out once, and kept for the next call on the same keys."""
        names = tuple(keys)
        plan = self._plans.get(names)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[names] = packings(keys, self.view.settings.slice_bytes)
        return plan

    def _is_pack(self, packing: Packing, move: calls.Move) -> bool:
        """Whether the packing goes as a pack: at its second use, or at once if it is a push of many slices, which the
        server can treat as one as long as they have come equally far."""
        packing.uses += 1
        return self._packs and (packing.uses > 1 or (move.push and len(packing.places) > 1))

    def _send_parts(self, call: Call, move: calls.Move, packing: Packing, clocks: list[int]) -> None:
        parts = tuple(
            [Part(key, index, clocks[item]) for (key, index), item in zip(packing.places, packing.items, strict=True)]
        )
        if move.push:
            self._put(call, move, packing, Push(self._number(), parts, move.how, move.samples, move.pull))
        else:
            self._put(call, move, packing, Pull(self._number(), parts))

    def _send_pack(self, call: Call, move: calls.Move, packing: Packing, clock: int) -> None:
        if packing.declared_to != self._servers.get(packing.server):
            self._declare(packing, move.priority)
        if move.push:
            message = PushPack(self._number(), packing.pack, clock, move.how, move.samples, move.pull)
            self._put(call, move, packing, message)
        else:
            self._put(call, move, packing, PullPack(self._number(), packing.pack, clock))

    def _declare(self, packing: Packing, priority: int) -> None:
        """Tells the server what is in the pack, ahead of the message that names it."""
        server = self._servers.get(packing.server)
        if packing.pack == 0:
            self._last_pack += 1
            packing.pack = self._last_pack
        packing.declared_to = server or 0
        message = DeclarePack(self._number(), packing.pack, packing.places)
        self._post(None, Entry(server, message, lambda entry, event: self._settled(None, entry), priority=priority))

    def _put(self, call: Call, move: calls.Move, packing: Packing, message: Push | Pull | PushPack | PullPack) -> None:
        payload: tuple[Span, ...] = ()
        if move.push and move.how != ABSENT:
            items = move.items
            payload = tuple(
                [
                    Span(items[item].source, offset, nbytes)
                    for item, (offset, nbytes) in zip(packing.items, packing.ranges, strict=True)
                ]
            )
        self._post(
            call,
            Entry(
                self._servers.get(packing.server),
                message,
                partial(self._moved, call, move, packing),
                payload,
                packing.nbytes if payload else 0,
                move.priority,
                packing.places if move.push else (),
                packing,
            ),
        )

    def _moved(self, call: Call, move: calls.Move, packing: Packing, entry: Entry, event: Received) -> None:
        """An answer to one message of a move."""
        message = event.message
        error: KvdError | None = None
        if (
            isinstance(message, Values)
            and event.nbytes == packing.nbytes
            and len(message.versions) in (1, len(packing.places))
        ):
            self._copy_values(call, move, packing, message, event)
        elif isinstance(message, Refused):
            error = self._error_of(event)
            if isinstance(error, NodeLost) and move.push and message.nodes[0].startswith("worker"):
                self._lost_a_fellow(call, entry, error)
                return
            call.is_taken_in_part |= message.expected > 0
        elif not isinstance(message, Done) or move.pull:
            error = errors.ProtocolError(f"the server answered with a {type(message).__name__} that does not fit")
        self._settled(call, entry)
        call.remaining -= 1
        if error is not None:
            call.error = call.error or error
            call.refused += 1
            if move.push and call.refused == 1:
                for key in call.keys:
                    key.failing_pushes += 1
        if move.push:
            call.unsettled -= 1
            self._check_staged()
        if call.remaining == 0:
            self._release_pulls(call)
            if move.push:
                self._push_settled(call)
            self._complete(call, call.result, call.error)
        elif error is not None:
            self._complete(call, error=error)
        if move.push:
            self._check_unsettled(call)

    def _lost_a_fellow(self, call: Call, entry: Entry, error: NodeLost) -> None:
        """A worker of the round is dead. The push stays staged: it may come back. Only the waiting ends."""
        self._outbox.staged(entry, self._now)
        self._complete(call, error=error)
        self._check_staged()

    def _copy_values(self, call: Call, move: calls.Move, packing: Packing, values: Values, event: Received) -> None:
        """Copies what was pulled to where the call wants it. After the deadline the memory is the program's again."""
        result = call.result
        if len(values.versions) == 1:
            version = values.versions[0]
            seen_now = calls.Versions(version, version)
            for item in packing.items:
                seen = result[item]
                if seen is None:
                    result[item] = seen_now
                elif seen != seen_now:
                    result[item] = calls.Versions(min(seen.oldest, version), max(seen.newest, version))
        else:
            for item, version in zip(packing.items, values.versions, strict=True):
                oldest, newest = result[item] or (version, version)
                result[item] = calls.Versions(min(oldest, version), max(newest, version))
        if not call.completed:
            items = move.items
            targets = tuple([items[item].target for item in packing.items])
            self._out.append(Copy(event.payload, targets, packing.rows))

    def _release_pulls(self, call: Call) -> None:
        """What the call pulled is here, or not wanted any more: the rounds may go on."""
        released, call.pulls = call.pulls, []
        for key, clock in released:
            key.pulling.remove(clock)
        if not call.pushes:
            for key, _ in released:
                self._out_of_queue(key)

    def _push_settled(self, call: Call) -> None:
        """All messages of a push are answered: the window moves on. A push that nobody took gives its clock back."""
        assert isinstance(call.request, calls.Move)
        nobody_took_it = call.refused == call.messages and not call.is_taken_in_part
        for key in call.keys:
            key.open_pushes -= 1
            if call.refused:
                key.failing_pushes -= 1
                if nobody_took_it and key.open_pushes == 0:
                    key.clock -= 1
                else:
                    key.broken = call.error
        for key in call.keys:
            if key.queue:
                self._out_of_queue(key)

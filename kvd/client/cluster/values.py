"""Init, push, pull and pushpull in a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvd.client.calls import checks
from kvd.client.calls.bound_arrays import BoundList
from kvd.client.calls.casting import CastOuts
from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import KeyList
from kvd.client.calls.memory_budget import Reservation
from kvd.client.calls.merging import MergeChoice, own_merges, with_merge
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.promise import Promise
from kvd.client.calls.restored_keys import RestoredKeys
from kvd.client.calls.tables import check_descriptions, check_no_tables, parted
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.calls.values import BYTE, Array, Source, Target, are_sources_kept, first_unlike
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.compression import GradientCompression
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.held_versions import HeldVersions
from kvd.client.cluster.new_values import NewValues
from kvd.client.cluster.plain_calls import PlainCall, PlainCalls
from kvd.client.cluster.pushed_values import CompressedValues, PushedValues
from kvd.client.cluster.small_calls import SmallCalls, single_of
from kvd.client.cluster.small_frames import PreparedCall
from kvd.client.cluster.tables import ClusterTables, PushedTable
from kvd.client.cluster.transfers import nothing, pull_into, pulled
from kvd.core import requests
from kvd.core.requests import Item, TakenForm
from kvd.core.worker.transfer import say_unpushed
from kvd.errors import KeyExists, RemoteError
from kvd.protocol.messages import BIGGEST

NO_KEYS = KeyList([], True)


class ClusterValues:
    """Each call becomes one request, submitted before the call returns: calls on a key keep their order.

    Args:
        restored: the keys that this worker has restored.
        rank: the rank of this worker; rank 0 makes the keys.
        check_bound: whether the end of a push tells if its bound gradients were written to.
        compression: of what is pushed, but for rows of tables.
        declares: whether `pushpull` makes the keys that are new.
    """

    def __init__(
        self,
        engine: Engine,
        arguments: Arguments,
        plain: PlainCalls,
        bound: BoundKeys,
        unobserved: UnobservedErrors,
        steps: ProgramSteps,
        restored: RestoredKeys,
        rank: int,
        check_bound: bool,
        compression: GradientCompression,
        tables: ClusterTables,
        small: SmallCalls,
        *,
        declares: bool,
    ) -> None:
        self._engine = engine
        self._arguments = arguments
        self._unobserved = unobserved
        self._watched = unobserved.watch
        self._steps = steps
        # With `check_bound`, a push that was sent may fail here, too.
        self._untake = None if check_bound else steps.untake_pushes
        self._restored = restored
        self._rank = rank
        self._compression = compression
        self._tables = tables
        self._plain = plain
        self._small = small
        self._declares = declares
        self._declared: set[str] = set()
        self._held = HeldVersions(engine.written)
        self._submit_push = bound.verified(engine.submit) if check_bound else engine.submit

    def init(self, key: Any, value: Any, merge: MergeChoice = None, *, gradients: bool = False) -> Handle:
        keys = self._arguments.named(key)
        keys.check_distinct("init")
        names, values, tables = parted(keys, value, lambda _: False)
        merges = own_merges(keys, merge)
        is_sent = self._rank == 0
        sources = self._arguments.init_sources(KeyList(names, True, None, keys.written), values, copy=is_sent)
        sources = with_merge(keys, names, sources, merges, gradients=gradients)
        check_descriptions(tables)
        sources += [self._arguments.new_table(description, merges.get(name, "")) for name, description in tables]
        begun = self._arguments.first_pages(tables) if is_sent else {}
        self._tables.note_init([name for name, _ in tables])
        names += [name for name, _ in tables]
        try:
            default = self._engine.machine.view.settings.merge
            to_make = self._restored.to_make(names, [spec for _, spec in sources], default)
        except RemoteError as error:
            return self._watched(names, Handle.failed(self._engine.written.restored(error)))
        items = [Item(names[place], sources[place].spec, sources[place].data) for place in to_make]
        for place, item in enumerate(items):
            if item.key in begun:
                data, pages = begun[item.key]
                items[place] = item._replace(source=data, pages=pages)
        return self._watched(names, Handle(self._engine.submit(requests.InitKeys(tuple(items))), what="init"))

    def push(
        self, key: Any, value: Any, priority: int, samples: int, reservation: Reservation | None, cast: bool = False
    ) -> Handle:
        keys = self._arguments.named(key)
        names = keys.names
        priority, samples = checks.priority_and_samples(priority, samples)
        rows: Sequence[PushedTable] = ()
        whole = keys
        tables: list[tuple[str, Any]] = []
        try:
            if not keys.many and self._tables.is_table(names[0]):  # by far the most common push of rows
                whole, value, tables = NO_KEYS, (), [(names[0], value)]
            elif self._tables.are_pushed(keys, value):
                value = self._tables.with_dense_rows(keys, value, cast=cast)
                whole_names, value, tables = parted(keys, value, self._tables.is_table)
                whole = KeyList(whole_names, True, None, keys.written)
            if tables:
                rows = self._tables.rows(tables, cast=cast)
            pushed = self._pushed(whole, value, cast, copy=True, reservation=reservation, rows=rows)
        except RemoteError as error:
            say_unpushed(error, self._engine.machine.view)
            self._engine.written.restored(error)
            raise
        if not names:
            return Handle.of(None)
        if not self._steps.take_pushes(names):
            return Handle.of(None)
        transfer = requests.Transfer(
            (*pushed.items([None] * len(whole.names)), *(table.item() for table in rows)),
            push=True,
            pull=False,
            priority=priority,
            samples=samples,
            cast=cast,
            place=self._steps.place,
            some_encoded=pushed.some_encoded,
            sets_out=pushed.sets_out,
            some_rows=bool(rows),
        )
        return self._watched(
            names, Handle(self._submit_push(transfer), nothing, "push", self._engine.wait), self._untake
        )

    def _pushed(
        self,
        keys: KeyList,
        value: Any,
        cast: bool,
        *,
        copy: bool,
        reservation: Reservation | None,
        rows: Sequence[PushedTable] = (),
    ) -> PushedValues:
        """What a push brings, besides rows of tables. With `cast` it travels as the program has it, and is not
        compressed."""
        compressing = None if cast else self._compression.current
        also = [table.source for table in rows]
        if compressing is None:
            sources = self._arguments.sources(keys, value, copy=copy, reservation=reservation, rows=also)
            return PushedValues(keys.names, sources)
        sources, rooms = self._arguments.rooms(keys, value, compressing, copy=copy, reservation=reservation, rows=also)
        if not any(rooms):
            return PushedValues(keys.names, sources)
        return CompressedValues(keys.names, sources, rooms, self._compression, compressing)

    @property
    def _taken(self) -> TakenForm | None:
        """The form in which pulled values may come. Where none does, keys are pulled together."""
        compressing = self._compression.current
        return None if compressing is None or not self._engine.machine.view.is_sync else compressing.takes

    def forget(self, names: Sequence[str]) -> None:
        """The keys are deleted: the next call on them may make them, so it takes no short way."""
        deleted = frozenset(names)
        self._declared -= deleted
        self._plain.forget(deleted)
        self._small.forget(deleted)

    def pull(self, key: Any, out: Any, priority: int, cast: bool = False, view: bool = False) -> Handle:
        keys = self._arguments.named(key)
        priority, _ = checks.priority_and_samples(priority)
        if out is None or not keys.names:
            return self._pull_fresh(keys, priority, view=view)
        if cast:
            return self._pull_fresh(keys, priority, CastOuts(keys, out))
        return self._pull_into(keys, self._arguments.targets(keys, out), out, priority)

    def _pull_into(self, keys: KeyList, targets: list[Target], out: Any, priority: int) -> Handle:
        promise = self._engine.submit(pull_into(keys.names, targets, priority, self._taken))
        return Handle(promise, pulled(keys, targets, out), "pull", self._engine.wait)

    def _pull_fresh(self, keys: KeyList, priority: int, outs: CastOuts | None = None, *, view: bool = False) -> Handle:
        """Pulls into new arrays, and from there into `outs`, if there are any. `view`: the arrays are of
        `HeldVersions`.

        The shapes of the keys may be unknown still, but the call must keep its place among the others on its keys: so
        it is submitted at once, and the bytes become arrays when the handle is waited on."""
        names = keys.names
        if not names:
            return Handle.of([])
        pieces = NewValues(names, self._held if view else None)
        items = tuple(Item(name, None, None, piece) for name, piece in zip(names, pieces.buffers, strict=True))
        transfer = requests.Transfer(
            items, push=False, pull=True, priority=priority, takes=self._taken, finds=pieces.found
        )
        finish = partial(_given, pieces, keys, outs)
        return Handle(self._engine.submit(transfer), finish, "pull", self._engine.wait)

    def pushpull(
        self,
        key: Any,
        value: Any,
        out: Any,
        priority: int,
        samples: int,
        copy: bool,
        reservation: Reservation | None,
        cast: bool = False,
        view: bool = False,
    ) -> Handle:
        in_place = "pushpull" if out is None else ""
        out = value if out is None else out
        has_defaults = type(priority) is type(samples) is int and priority == 0 and samples == 1
        may_be_plain = has_defaults and not (cast or view) and (not copy or type(key) is str)
        if may_be_plain and self._compression.current is None:
            if copy and type(value) is type(out) is np.ndarray and self._engine.is_well:
                prepared = self._small.find(key, value, out)
                if prepared is not None:
                    return self._pushpull_small(prepared, key, value, out, reservation)
            call = self._plain.find(key, value, out)
            if call is not None:
                return self._pushpull_plain(call, out, copy=copy, reservation=reservation)
        keys = self._arguments.named(key)
        names = keys.names
        priority, samples = checks.priority_and_samples(priority, samples)
        try:
            value = self._tables.with_dense_rows(
                keys, value, cast=cast, in_place=bool(in_place) and not view, declares=self._declares
            )
            check_no_tables(keys, self._tables.is_table)
            outs = CastOuts(keys, out, in_place) if cast and not view else None
            targets = [] if cast or view else self._arguments.targets(keys, out, in_place=in_place)
            pushed = self._pushed(keys, value, cast, copy=copy, reservation=reservation)
        except RemoteError as error:
            say_unpushed(error, self._engine.machine.view)
            self._engine.written.restored(error)
            raise
        sources = pushed.sources
        if not names:
            return Handle.of([])
        places: Sequence[Any]
        finish: Callable[[Any], Any]
        unlike = None if view else first_unlike(keys, sources, targets) if outs is None else outs.first_unlike(sources)
        if unlike is not None:
            return self._watched(names, self._arguments.mismatch(unlike, makes_key=self._declares))
        if not copy and targets and not are_sources_kept(sources, targets):
            copy = True  # a part of the answer may come before all values have left
            del pushed, sources
            pushed = self._pushed(keys, value, cast, copy=True, reservation=reservation)
            sources = pushed.sources
        if not self._steps.take_pushes(names):
            if view or outs is not None:
                return self._pull_fresh(keys, priority, outs, view=view)
            return self._pull_into(keys, targets, out, priority)
        if self._declares:
            self._declare(names, sources)
        pieces: NewValues | None = None
        if view or outs is not None:
            pieces = NewValues(names, self._held if view else None)
            places, finish = pieces.buffers, partial(_given, pieces, keys, outs)
        else:
            places, finish = [target.data for target in targets], pulled(keys, targets, out)
        transfer = requests.Transfer(
            pushed.items(places),
            push=True,
            pull=True,
            priority=priority,
            samples=samples,
            cast=cast,
            place=self._steps.place,
            some_encoded=pushed.some_encoded,
            sets_out=pushed.sets_out,
            finds=None if pieces is None else pieces.found,
        )
        reclaim = None if copy else partial(self._engine.take_back, [data for data, _ in sources])
        handle = Handle(self._submit_push(transfer), finish, "pushpull", self._engine.wait, reclaim)
        self._plain.note(key, keys)
        return self._watched(names, handle, self._untake)

    def _declare(self, names: Sequence[str], sources: Sequence[Source]) -> None:
        """Worker 0 makes the keys that are new, of zeros. The call that follows waits in their queues until they are
        there."""
        for name, (_, spec) in zip(names, sources, strict=True):
            if name in self._declared:
                continue
            self._declared.add(name)
            if self._rank == 0:
                init = self._engine.submit(requests.InitKeys((Item(name, spec, np.zeros(spec.nbytes, BYTE)),)))
                made = _but_for_existing(init)
                made.on_end(partial(self._declaration_ended, name))
                self._watched((name,), Handle(made, what="init"))
            found = self._engine.submit(requests.DescribeKey(name, wait=True))
            found.on_end(partial(self._declaration_ended, name))

    def _declaration_ended(self, name: str, promise: Promise) -> None:
        """If a declaration failed, the next call declares the key again."""
        if promise.exception() is not None:
            self._declared.discard(name)

    def pushpull_and_wait(
        self, key: Any, value: Any, out: Any, priority: int, samples: int, cast: bool = False, view: bool = False
    ) -> Any:
        may_repeat = type(priority) is type(samples) is int and samples == 1 and -BIGGEST <= priority <= BIGGEST
        single = None
        if may_repeat and not cast and self._compression.current is None:
            single = single_of(key, value, value if out is None else out)
        if single is None:
            return self.pushpull(key, value, out, priority, samples, False, None, cast, view).wait()
        written, source, target = single
        if view and self._small.is_prepared(written):
            target = np.empty(source.shape, source.dtype)
        call = self._small.find(written, source, target)
        if call is None:
            result = self.pushpull(key, value, out, priority, samples, False, None, cast, view).wait()
            self._small.prepare(written, source)
            return result
        name = call.item.key
        if self._unobserved.failed:
            self._unobserved.raise_for((name,))
        if self._steps.take_pushes((name,)):
            handle = self._small.run(call, source, target, self._steps.place, priority)
            if handle is not None:
                self._watched((name,), handle, self._untake).wait()
        else:  # a step that is made again has pushed it before
            keys = KeyList([name], False)
            self._pull_into(keys, self._arguments.targets(keys, target), target, priority).wait()
        if view:
            target.flags.writeable = False
        return [target] if type(key) in (list, tuple) else target

    def pushpull_bound(self, bound: BoundList, targets: Callable[[], Sequence[Array]], priority: int) -> Handle:
        names = bound.keys.names
        self._arguments.raise_unobserved(names)
        pieces = NewValues(names)
        if not self._steps.take_pushes(names):  # a step that is made again has pushed them before
            items = tuple([Item(name, None, None, piece) for name, piece in zip(names, pieces.buffers, strict=True)])
            transfer = requests.Transfer(
                items, push=False, pull=True, priority=priority, takes=self._taken, finds=pieces.found
            )
            return Handle(self._engine.submit(transfer), lambda _: pieces.move_to(targets()), "pull", self._engine.wait)
        if self._compression.current is None:
            pushed = PushedValues(names, bound.sources)
        else:
            pushed = self._pushed(bound.keys, bound.gradients, False, copy=False, reservation=None)
        transfer = requests.Transfer(
            pushed.items(pieces.buffers),
            push=True,
            pull=True,
            priority=priority,
            place=self._steps.place,
            some_encoded=pushed.some_encoded,
            sets_out=pushed.sets_out,
            finds=pieces.found,
            in_few=True,
            whole=bound.whole,
        )
        promise = self._submit_push(transfer)
        handle = Handle(promise, lambda _: pieces.move_to(targets()), "pushpull", self._engine.wait)
        return self._watched(names, handle, self._untake)

    def _pushpull_small(
        self, prepared: PreparedCall, name: str, value: Array, out: Array, reservation: Reservation | None
    ) -> Handle:
        """The same for a small value that was pushed before."""
        names = (name,)
        self._arguments.raise_unobserved(names)
        if not self._steps.take_pushes(names):
            return self._pull_again(names, out)
        handle = self._small.begin(prepared, value, out, self._steps.place)
        if handle is not None:
            return self._watched(names, handle, self._untake)
        item = prepared.item._replace(source=value.ravel().view(BYTE), target=out.ravel().view(BYTE))
        try:
            item = self._arguments.copied(item, reservation)
        except BaseException:  # there is no room, or a signal ended the wait for it
            self._steps.untake_pushes(names)
            raise
        return self._submit_plain(PlainCall(names, (item,)), out, copy=True)

    def _pushpull_plain(self, call: PlainCall, out: Any, *, copy: bool, reservation: Reservation | None) -> Handle:
        """The same for arrays of which nothing but these need be looked at."""
        self._arguments.raise_unobserved(call.names)
        if copy:
            call = call._replace(items=(self._arguments.copied(call.items[0], reservation),))
        if not self._steps.take_pushes(call.names):
            return self._pull_again(call.names, out)
        if copy:
            self._small.prepare(call.names[0], out)
        return self._submit_plain(call, out, copy=copy)

    def _pull_again(self, names: Sequence[str], out: Any) -> Handle:
        """A step that is made again has pushed the keys before."""
        keys = KeyList(list(names), type(out) is not np.ndarray)
        return self._pull_into(keys, self._arguments.targets(keys, out), out, 0)

    def _submit_plain(self, call: PlainCall, out: Any, *, copy: bool) -> Handle:
        names, items, _ = call
        many = type(out) is not np.ndarray
        transfer = requests.Transfer(items, push=True, pull=True, place=self._steps.place)
        if call.listed is None:
            promise = self._submit_push(transfer)
        else:
            promise = self._engine.submit(requests.ListTransfer(call.listed, transfer))
        handle = Handle(
            promise,
            lambda _: list(out) if many else out,
            "pushpull",
            self._engine.wait,
            None if copy else lambda: self._engine.take_back(call.sources()),
        )
        return self._watched(names, handle, self._untake)


def _but_for_existing(made: Promise) -> Promise:
    """Ends like the init of a key, but well if the key exists."""
    ended = Promise()

    def end(promise: Promise) -> None:
        error = promise.exception()
        if error is None or isinstance(error, KeyExists):
            ended.set_result(None)
        else:
            ended.set_exception(error)

    made.on_end(end)
    return ended


def _given(pieces: NewValues, keys: KeyList, outs: CastOuts | None, _: Any) -> Any:
    """Makes the result of a call of what has arrived: `outs`, if there are any, else new arrays."""
    return pieces.given(keys) if outs is None else outs.fill(pieces.arrays())

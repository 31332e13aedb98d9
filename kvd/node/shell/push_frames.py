"""Small pushes on a server, from their frames to the frames of the answers, without a message or an event for each.

All frames of one worker's small pushes over one link begin with the same bytes, as long as there is no other view.
Behind these are the numbers and the value. The machine takes them (`ServerMachine.push`) as it takes the message in a
step. Updates are calculated at once, and the answers to one worker leave in one write.

A push that the machine does not take is delivered like any other message.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from kvd.core.machine import Apply, InRun, JobDone, Peer, Send, Span
from kvd.core.principals import HOLDER, Principal
from kvd.core.server.machine import ServerMachine
from kvd.core.server.router import ServerRouter
from kvd.node.jobs.runner import JobRunner
from kvd.node.shell.counters import Counters
from kvd.node.shell.sending import MessageSender
from kvd.node.shell.threads import Stepper, report_failed_effect
from kvd.observe.log import event
from kvd.protocol.envelope import Decoded
from kvd.protocol.fixed import (
    DONE_NBYTES,
    PUSH_HEAD_NBYTES,
    PUSH_NBYTES,
    PUSH_TAIL_NBYTES,
    VALUES_NBYTES,
    PushNumbers,
    done_header,
    numbers_of,
    push_numbers,
    values_header,
)
from kvd.protocol.messages import Done, Epoch, PushBatch, Values
from kvd.transport.base import OnMessage
from kvd.transport.host import HostTransport
from kvd.transport.links.frames import INLINE, INLINE_BELOW_BYTES, MESSAGE, PREFIX, prefix_of
from kvd.transport.links.link import Link

MOST_WAITING = 16
"""Answers to one worker that wait for the next one: a worker that has many calls in flight can continue meanwhile."""

MAX_LINKS = 1 << 12  # whose answers leave as frames; the others leave as messages
FEW_LINKS = 16  # from so many on, those that have ended are forgotten when as many more have come

_DONE_PREFIX = prefix_of(MESSAGE, 0, DONE_NBYTES)

InRunAction: TypeAlias = Callable[[InRun], None]

logger = logging.getLogger("kvd.node")


class PushFrames:
    """Frames of one worker's small pushes over one link, and of the answers to them.

    Args:
        pushes: takes them.
        link: brings them.
        header: of one of them.
        decoded: the same header, decoded.
        nbytes: of its value.

    Attributes:
        peer, sender, run: the connection, the worker's incarnation and its run.
        head: the first bytes of such a frame.
        rest_nbytes: length of a frame behind its head.
        nbytes: of the values.
        take_all: takes frames, without their heads. Called by the link.
    """

    __slots__ = ("_answers", "_link", "_prefix", "head", "nbytes", "peer", "rest_nbytes", "run", "sender", "take_all")

    def __init__(
        self, pushes: SmallPushes, peer: Peer, link: Link, header: bytes, decoded: Decoded, nbytes: int
    ) -> None:
        self.peer = peer
        self.sender = decoded.sender
        self.run = decoded.run
        self.head = prefix_of(INLINE, 0, PUSH_NBYTES, nbytes) + header[:PUSH_HEAD_NBYTES]
        self.rest_nbytes = PUSH_TAIL_NBYTES + nbytes
        self.nbytes = nbytes
        self.take_all = partial(pushes.take_all, self)
        self._link = link
        self._prefix = prefix_of(INLINE, 0, VALUES_NBYTES, nbytes)
        self._answers: list[bytes | memoryview] = []  # prefix, header and value of each that waits

    def let_wait(self, header: bytes, value: Span | None) -> None:
        """Let an answer wait for `send_answers`, if not too many wait already.

        Args:
            value: of `nbytes` bytes, behind a header of `VALUES_NBYTES`; None: the answer is a Done.
        """
        answers = self._answers
        if value is None:
            answers += (_DONE_PREFIX, header, b"")
        else:
            answers += (self._prefix, header, memoryview(value.buffer)[value.offset : value.offset + value.nbytes])
        if len(answers) >= 3 * MOST_WAITING:
            self.send_answers()

    def send_answers(self) -> None:
        """Write the answers that wait. If the link is down, the worker asks again."""
        if self._answers:
            self._link.send_frames(b"".join(self._answers))
            self._answers.clear()


class SmallPushes:
    """Small pushes of all runs and workers of a server. Belongs to the loop's thread.

    Args:
        runner: returns what runs the jobs of a run.
        carry_out: carries out the effects of a run in any other way than this.
        deliver: takes the messages that go to `step`.
        counters: count the pushes and answers that are no messages.
    """

    def __init__(
        self,
        router: ServerRouter,
        transport: HostTransport,
        stepper: Stepper,
        sender: MessageSender,
        runner: Callable[[int], JobRunner],
        carry_out: InRunAction,
        deliver: OnMessage,
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._router = router
        self._transport = transport
        self._stepper = stepper
        self._sender = sender
        self._runner = runner
        self._carry_out = carry_out
        self._deliver = deliver
        self._frames: dict[Peer, PushFrames] = {}  # of the links that are up, by their names
        self._looks_at = FEW_LINKS  # with so many, it looks which are not up any more
        self._answering: dict[PushFrames, None] = {}  # with answers that wait
        self._deadline = math.inf  # by which the machines must be stepped, as records were sent last

    def take(self, peer: Peer, header: bytes, decoded: Decoded, payload: memoryview, principal: Principal) -> bool:
        """Take a push that came as a message. If it came over a link, the next one like it is taken as a frame.

        Returns:
            False if it is to be delivered as a message.
        """
        push, nbytes = decoded.message, len(payload)
        if len(header) != PUSH_NBYTES or nbytes > INLINE_BELOW_BYTES or principal is not HOLDER:
            return False
        numbers = push_numbers(push) if type(push) is PushBatch else None
        if numbers is None:
            return False
        link = self._transport.link_to(peer)
        if link is not None:
            self._watch(PushFrames(self, peer, link, header, decoded, nbytes), link)
        machine = self._router.machine_of(decoded.run)
        if machine is None or not self._stepper.enter():
            return False
        try:
            is_taken = self._take(machine, decoded.run, peer, decoded.sender, numbers, payload, nbytes)
        finally:
            self._stepper.leave(self._deadline)
            self._deadline = math.inf
        if self._answering:
            self._send_answers()
        return is_taken

    def take_pull(self, peer: Peer, decoded: Decoded, principal: Principal) -> bool:
        """Take a pull of a batch. False: it is to be delivered as a message."""
        machine = self._router.machine_of(decoded.run)
        if machine is None or principal is not HOLDER or not self._stepper.enter():
            return False
        try:
            pull: Any = decoded.message
            is_taken = machine.pull(peer, decoded.sender, pull)
            if is_taken:
                self._carry_out_all(machine, decoded.run)
        except Exception as error:  # noqa: BLE001  as in `_take`
            _report(error)
            is_taken = True
        finally:
            self._stepper.leave(self._deadline)
            self._deadline = math.inf
        if self._answering:
            self._send_answers()
        return is_taken

    def _watch(self, frames: PushFrames, link: Link) -> None:
        """Has the next pushes like these taken as frames."""
        if frames.peer not in self._frames and len(self._frames) >= self._looks_at:
            self._frames = {peer: each for peer, each in self._frames.items() if self._transport.link_to(peer)}
            self._looks_at = min(MAX_LINKS, max(FEW_LINKS, 2 * len(self._frames)))
        if frames.peer in self._frames or len(self._frames) < MAX_LINKS:
            self._frames[frames.peer] = frames
            link.delivery.repeated = frames

    def take_all(self, frames: PushFrames, rests: list[bytes]) -> None:
        """Take frames that came one after the other.

        Args:
            rests: of each frame the bytes behind the head.
        """
        peer, sender, run, nbytes = frames.peer, frames.sender, frames.run, frames.nbytes
        at, count, counters = 0, len(rests), self._counters
        while at < count:
            begun = at
            machine = self._router.machine_of(run)
            if machine is not None and self._stepper.enter():
                try:
                    while at < count:
                        rest = rests[at]
                        numbers = numbers_of(rest)
                        if numbers is None:
                            break
                        if not self._take(machine, run, peer, sender, numbers, rest[PUSH_TAIL_NBYTES:], nbytes):
                            break
                        at += 1
                finally:
                    self._stepper.leave(self._deadline)
                    self._deadline = math.inf
                counters.received[PushBatch] += at - begun
                counters.received_bytes += (at - begun) * nbytes
            if at < count:
                self._deliver_rest(frames, rests[at])
                at += 1
        if self._answering:
            self._send_answers()

    def _deliver_rest(self, frames: PushFrames, rest: bytes) -> None:
        """Deliver a frame as a message."""
        header = frames.head[PREFIX.size :] + rest[:PUSH_TAIL_NBYTES]
        self._deliver(frames.peer, header, memoryview(rest)[PUSH_TAIL_NBYTES:], HOLDER)

    def _take(
        self,
        machine: ServerMachine,
        run: int,
        peer: Peer,
        sender: int,
        numbers: PushNumbers,
        payload: bytes | memoryview,
        nbytes: int,
    ) -> bool:
        """Have the machine take a push, and carry out its effects. False: nothing was done."""
        try:
            if not machine.push(peer, sender, numbers, payload, nbytes):
                return False
            self._carry_out_all(machine, run)
        except Exception as error:  # noqa: BLE001  a bug must not end the node; the worker asks again
            _report(error)
        return True

    def _carry_out_all(self, machine: ServerMachine, run: int) -> None:
        """Carry out the effects of the machine, and of the updates among them."""
        effects: Sequence[Any] = machine.take_effects()
        if effects:
            epoch = machine.epoch
            while effects:
                effects = self._do(machine, run, epoch, effects)
        if machine.records.has_new:
            self._send_records(machine, run)

    def _do(self, machine: ServerMachine, run: int, epoch: Epoch, effects: Sequence[Any]) -> Sequence[Any]:
        """Carry out effects of the machine. Return those of the updates that end here."""
        ended: list[JobDone] = []
        for effect in effects:
            kind = type(effect)
            try:
                if kind is Apply:
                    ended.append(self._runner(run).run(effect, run))
                elif kind is Send:
                    self._send(effect, run, epoch)
                else:
                    self._carry_out(InRun(run, epoch, self._router.of_run(run, machine, [effect])))
            except Exception as error:  # noqa: BLE001  the next ones are carried out all the same
                report_failed_effect(effect, error)
        for done in ended:
            machine.end_job(done)
        return machine.take_effects() if ended else ()

    def _send_records(self, machine: ServerMachine, run: int) -> None:
        """Send new records to backups."""
        effects = machine.take_records(self._stepper.now())
        self._carry_out(InRun(run, machine.epoch, self._router.of_run(run, machine, effects)))
        self._router.note_deadline(run, machine)
        self._deadline = self._router.next_deadline() or math.inf

    def _send(self, effect: Send, run: int, epoch: Epoch) -> None:
        """Let an answer with one value wait for the others to its worker; send any other message."""
        message, frames, payload = effect.message, self._frames.get(effect.peer), effect.payload
        if frames is not None and type(message) is Done:
            self._counters.sent[Done] += 1
            frames.let_wait(done_header(self._router.incarnation, epoch, run, message.request), None)
            self._answering[frames] = None
        elif (
            frames is not None
            and type(message) is Values
            and message.coding is None
            and len(payload) == 1
            and payload[0].nbytes == frames.nbytes
        ):
            (version,) = message.versions
            self._counters.sent[Values] += 1
            self._counters.sent_bytes += frames.nbytes
            frames.let_wait(values_header(self._router.incarnation, epoch, run, message.request, version), payload[0])
            self._answering[frames] = None
        else:
            self._sender.send(effect, run, epoch)

    def _send_answers(self) -> None:
        """Write the answers that wait."""
        answering, self._answering = self._answering, {}
        for frames in answering:
            frames.send_answers()


def _report(error: Exception) -> None:
    """The log says that a push or pull could not be handled."""
    event(logger, logging.ERROR, "a push could not be handled", error=repr(error))
    logger.debug("the traceback of the error above", exc_info=error)

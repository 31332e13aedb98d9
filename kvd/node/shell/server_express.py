"""The express way of a server: from the frame of a small push that is repeated to the frame of its answer.

All frames of such pushes over one link begin with the same bytes, as long as there is no other view. What comes behind
are numbers and the value. The machine holds them (`kvd.core.server.express`) until the round is whole. Its update is
made here at once, and the answers leave in one write to each worker.

A push that the machine does not hold is delivered as any other message.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from kvd.core.machine import Peer, Send, Span
from kvd.core.principals import HOLDER, Principal
from kvd.core.server.express import Round
from kvd.core.server.machine import ServerMachine
from kvd.core.server.router import ServerRouter
from kvd.node.jobs.runner import JobRunner
from kvd.node.shell.counters import Counters
from kvd.node.shell.sending import MessageSender
from kvd.node.shell.threads import Stepper
from kvd.observe.log import event
from kvd.protocol.envelope import Decoded
from kvd.protocol.fixed import (
    PUSH_HEAD_NBYTES,
    PUSH_NBYTES,
    PUSH_TAIL_NBYTES,
    VALUES_NBYTES,
    PushNumbers,
    numbers_of,
    push_numbers,
    values_header,
)
from kvd.protocol.messages import Done, Epoch, PushBatch, Values
from kvd.transport.base import OnMessage
from kvd.transport.host import HostTransport
from kvd.transport.links.frames import INLINE, INLINE_BELOW_BYTES, PREFIX, prefix_of
from kvd.transport.links.link import Link

MOST_WAITING = 16
"""Answers to one worker that wait for the next one: a worker that has many calls under way can go on meanwhile."""

Array: TypeAlias = np.ndarray[Any, Any]

logger = logging.getLogger("kvd.node")


class RepeatedPushes:
    """The small pushes of one worker that come over one link, or over another connection.

    Args:
        link: that takes the answers; None: they leave as messages.
        header: of one of them.
        decoded: the same, as a message.
        nbytes: of its value.

    Attributes:
        peer, sender, run: whose pushes they are.
        head: what the frames of such pushes begin with.
        rest_nbytes: of a frame behind that.
        nbytes: of the values.
    """

    __slots__ = ("_answers", "_link", "_prefix", "_way", "head", "nbytes", "peer", "rest_nbytes", "run", "sender")

    def __init__(
        self, way: ServerExpress, peer: Peer, link: Link | None, header: bytes, decoded: Decoded, nbytes: int
    ) -> None:
        self.peer = peer
        self.sender = decoded.sender
        self.run = decoded.run
        self.head = prefix_of(INLINE, 0, PUSH_NBYTES, nbytes) + header[:PUSH_HEAD_NBYTES]
        self.rest_nbytes = PUSH_TAIL_NBYTES + nbytes
        self.nbytes = nbytes
        self._way = way
        self._link = link
        self._prefix = prefix_of(INLINE, 0, VALUES_NBYTES, nbytes)
        self._answers: list[bytes | memoryview] = []  # prefix, header and value of each that waits

    def take_all(self, rests: list[bytes]) -> None:
        """Frames have come that begin like the others. Called by the link."""
        self._way.take_all(self, rests)

    def answer(self, header: bytes, value: Array) -> bool:
        """The answer to one of the pushes. False: there is no link, and it leaves as a message."""
        if self._link is None:
            return False
        answers = self._answers
        answers += (self._prefix, header, value.data)
        if len(answers) >= 3 * MOST_WAITING:
            self.send_answers()
        return True

    def send_answers(self) -> None:
        """Writes the answers that wait. If the link is down, the worker asks again."""
        if self._answers and self._link is not None:
            self._link.send_frames(b"".join(self._answers))
            self._answers.clear()


class ServerExpress:
    """The express way of all runs and workers of a server. Belongs to the loop's thread.

    Args:
        runner: what runs the jobs of a run.
        deliver: takes messages that go the general way.
        counters: count the pushes that are held.
    """

    def __init__(
        self,
        router: ServerRouter,
        transport: HostTransport,
        stepper: Stepper,
        sender: MessageSender,
        runner: Callable[[int], JobRunner],
        deliver: OnMessage,
        counters: Counters,
    ) -> None:
        self._held = counters.held
        self._unpulled = counters.unpulled
        self._deliver = deliver
        self._router = router
        self._transport = transport
        self._stepper = stepper
        self._sender = sender
        self._runner = runner
        self._answering: dict[RepeatedPushes, None] = {}  # who has answers that wait

    def take(self, peer: Peer, header: bytes, decoded: Decoded, payload: memoryview, principal: Principal) -> bool:
        """Takes a push that came as a message; the next one like it comes as a frame, if there is a link. False: it
        goes the general way."""
        push, nbytes = decoded.message, len(payload)
        if len(header) != PUSH_NBYTES or nbytes > INLINE_BELOW_BYTES or principal is not HOLDER:
            return False
        numbers = push_numbers(push) if type(push) is PushBatch else None
        if numbers is None:
            return False
        link = self._transport.link_to(peer)
        pushes = RepeatedPushes(self, peer, link, header, decoded, nbytes)
        if link is not None:
            link.delivery.repeated = pushes
        machine = self._router.machine_of(decoded.run)
        if machine is None or not self._stepper.enter():
            return False
        try:
            is_held = self._hold(machine, pushes, numbers, payload)
        finally:
            self._stepper.leave(math.inf)
        self._send_answers()
        return is_held

    def take_all(self, pushes: RepeatedPushes, rests: list[bytes]) -> None:
        """Takes frames of these pushes, which came one after the other; `rests`: what they have behind the head."""
        at = 0
        while at < len(rests):
            at = self._hold_all(pushes, rests, at)
            if at < len(rests):
                self._deliver_rest(pushes, rests[at])
                at += 1
        self._send_answers()

    def _hold_all(self, pushes: RepeatedPushes, rests: list[bytes], at: int) -> int:
        """Holds the pushes from number `at` on. Returns the number of the first one that goes the general way, or how
        many there are."""
        machine, begun = self._router.machine_of(pushes.run), at
        if machine is None or not self._stepper.enter():
            return at
        try:
            while at < len(rests):
                rest = rests[at]
                numbers = numbers_of(rest)
                if numbers is None or not self._hold(machine, pushes, numbers, rest[PUSH_TAIL_NBYTES:]):
                    break
                at += 1
        finally:
            self._stepper.leave(math.inf)
        self._held[pushes.nbytes] += at - begun
        return at

    def _deliver_rest(self, pushes: RepeatedPushes, rest: bytes) -> None:
        """A frame goes the general way."""
        header = pushes.head[PREFIX.size :] + rest[:PUSH_TAIL_NBYTES]
        self._deliver(pushes.peer, header, memoryview(rest)[PUSH_TAIL_NBYTES:], HOLDER)

    def _hold(
        self, machine: ServerMachine, pushes: RepeatedPushes, numbers: PushNumbers, payload: bytes | memoryview
    ) -> bool:
        """Has the machine hold one of these pushes, and makes the update of its round if it is the last one. False: it
        goes the general way."""
        try:
            round_ = machine.fast.lane.hold(pushes.peer, pushes.sender, numbers, payload, pushes.nbytes, pushes)
            if round_ is None:
                return False
            if round_.update is not None:
                done = self._runner(pushes.run).run(round_.update, pushes.run)
                if done.error is None and machine.fast.express.end(round_, done.result):
                    self._answer(round_, done.result, pushes.run, machine.epoch)
                else:
                    self._stepper.queue(done)  # the general way says what became of it
        except Exception as error:  # a bug must not end the node; the worker asks again
            event(logger, logging.ERROR, "a push could not be handled", error=repr(error))
            logger.debug("the traceback of the error above", exc_info=error)
        return True

    def _answer(self, round_: Round, value: Array, run: int, epoch: Epoch) -> None:
        version, sender = round_.group.log.version, self._router.incarnation
        for push in round_.held.values():
            request, is_pull = push.numbers.request, push.numbers.pull
            source: RepeatedPushes = push.source
            if is_pull and source.answer(values_header(sender, epoch, run, request, version), value):
                self._answering[source] = None
            elif is_pull:
                self._unpulled[value.nbytes] += 1  # the sender counts it
                self._sender.send(
                    Send(push.peer, Values(request, (version,)), (Span(value, 0, value.nbytes),)), run, epoch
                )
            else:
                self._unpulled[value.nbytes] += 1
                self._sender.send(Send(push.peer, Done(request)), run, epoch)

    def _send_answers(self) -> None:
        """Writes the answers that wait."""
        for source in self._answering:
            source.send_answers()
        self._answering.clear()

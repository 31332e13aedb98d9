"""Messages in: decoded, or answered and logged as invalid frames."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from kvd.core.machine import InvalidFrame, Peer, PeerKind, Received, Send
from kvd.core.principals import HOLDER, Principal
from kvd.errors import ProtocolError
from kvd.node.shell.counters import Counters
from kvd.node.shell.payloads import arrived
from kvd.node.shell.sending import MessageSender
from kvd.node.shell.threads import Stepper
from kvd.observe.log import Throttle, event
from kvd.protocol.codec import decode
from kvd.protocol.envelope import Decoded
from kvd.protocol.fixed import PUSH_NBYTES, read_push
from kvd.protocol.messages import ErrorCode, PullBatch, PushBatch, Refused

LOG_INTERVAL_S = 10.0

TakePush: TypeAlias = Callable[[Peer, bytes, Decoded, memoryview, Principal], bool]
TakePull: TypeAlias = Callable[[Peer, Decoded, Principal], bool]

logger = logging.getLogger("kvd.node")


class MessageReceiver:
    """Called by the transport, on the thread that reads: the loop, or a program thread that waits (see
    `kvd.node.shell.threads`).

    Attributes:
        take_push: takes a push with a payload: its peer, header, decoded header, payload and principal; or returns
            False. None: they are messages like any other.
        take_pull: the same for pulls of batches.
    """

    def __init__(self, stepper: Stepper, sender: MessageSender, counters: Counters) -> None:
        self.takes_answer: Callable[[Peer, bytes, memoryview], bool] | None = None
        """A shorter way of answers with a payload: False: it has done nothing. Set before the first message."""
        self._stepper = stepper
        self._sender = sender
        self._counters = counters
        self._throttle = Throttle(LOG_INTERVAL_S)
        self.take_push: TakePush | None = None
        self.take_pull: TakePull | None = None

    def receive(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal = HOLDER) -> None:
        """Gives the machine one message. `payload` keeps its memory alive and is not written to."""
        if payload is not None and self.takes_answer is not None and self.takes_answer(peer, header, payload):
            return
        try:
            decoded = (read_push(header) if len(header) == PUSH_NBYTES else None) or decode(header)
        except ProtocolError as error:
            self.reject(peer, str(error))
            return
        sender, epoch, message, run = decoded
        counters = self._counters
        counters.received[type(message)] += 1
        if payload is not None:
            counters.received_bytes += len(payload)
        if type(message) is PushBatch and payload is not None:
            if self.take_push is None or not self.take_push(peer, header, decoded, payload, principal):
                self._stepper.feed(Received(peer, sender, epoch, message, payload, len(payload), run, principal))
            return
        if type(message) is PullBatch and self.take_pull is not None and self.take_pull(peer, decoded, principal):
            return
        values, nbytes, fault = arrived(message, payload)
        self._stepper.feed(Received(peer, sender, epoch, message, values, nbytes, run, principal, fault))

    def reject(self, peer: Peer, text: str) -> None:
        """Answers frames that are not a message with the reason, and logs them once per `LOG_INTERVAL_S`."""
        self._counters.invalid_frames += 1
        if self._throttle.allow(self._stepper.now(), "garbage"):
            swallowed = self._throttle.swallowed("garbage")
            event(logger, logging.WARNING, "received an invalid frame", error=text, not_logged=swallowed)
        if peer.kind is PeerKind.CALLER:
            self._sender.send_own(Send(peer, Refused(0, ErrorCode.PROTOCOL_ERROR, text[:1000])))
        self._stepper.feed(InvalidFrame(peer, text))

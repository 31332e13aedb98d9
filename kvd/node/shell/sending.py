"""Messages out: encoded, bounded, and filled in with what only the shell knows."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial

from kvd.core.machine import Gathered, Machine, Peer, PeerKind, PeerPath, Received, Send, ServerPeer, Span
from kvd.errors import ProtocolError
from kvd.node.daemon.facts import ProcessFacts, wall_clock_s
from kvd.node.shell.counters import Counters
from kvd.node.shell.payloads import joined
from kvd.node.shell.threads import Stepper
from kvd.observe.log import event
from kvd.protocol.codec import encode
from kvd.protocol.messages import (
    MAX_TEXT_CHARS,
    WITHIN_HOST,
    Attach,
    Epoch,
    ErrorCode,
    Message,
    NotYet,
    Refused,
    StatusReport,
    View,
    ViewChange,
)
from kvd.protocol.specs import MAX_PAYLOAD_BYTES
from kvd.transport.base import Transport
from kvd.transport.memory.leases import payload_nbytes

STATUS_PAUSE = 10  # times what it took to make a report, until another one is made
QUICK_REPORT_S = 0.005  # reports that take less are made each time
MAX_REPORTS = 64  # one for each run
MAX_ENCODED = 64  # messages to many nodes, of one view

_SPECIAL = frozenset({StatusReport, Attach, View, ViewChange, Refused, NotYet})

logger = logging.getLogger("kvd.node")


class MessageSender:
    """Runs on the thread that carries out effects or that received an invalid frame, see `kvd.node.shell.threads`."""

    def __init__(
        self,
        machine: Machine,
        transport: Transport,
        stepper: Stepper,
        counters: Counters,
        facts: ProcessFacts | None = None,
    ) -> None:
        self._machine = machine
        self._transport = transport
        self._stepper = stepper
        self._counters = counters
        self._facts = facts
        self._latest_view: tuple[Epoch, int] | None = None  # the epoch and the run of what is in `_encoded`
        self._encoded: dict[int, tuple[Message, bytes]] = {}  # by the identity of the message
        self._reports: dict[int, tuple[float, bytes]] = {}  # by run: the latest one, and until when it is good enough

    def send_own(self, effect: Send) -> None:
        """Sends a message of a machine that serves one run."""
        self.send(effect, self._machine.run, self._machine.epoch)

    def send(self, effect: Send, run: int, epoch: Epoch) -> None:
        """Sends a message of this run, whose view has this epoch. One that cannot be encoded is refused to this node's
        own machine, whose call fails now instead of at its deadline."""
        payload = effect.payload
        if payload and type(payload[0].buffer) is Gathered:
            payload = (joined(payload[0]),)
        nbytes = 0
        if payload:
            nbytes = payload[0].nbytes if len(payload) == 1 else payload_nbytes(payload)
        if nbytes > MAX_PAYLOAD_BYTES:
            text = f"a message carries at most {MAX_PAYLOAD_BYTES >> 20} MiB: ask for less at a time"
            self.send(
                Send(effect.peer, Refused(getattr(effect.message, "request", 0), ErrorCode.NOT_ALLOWED, text)),
                run,
                epoch,
            )
            return
        message, counters = effect.message, self._counters
        kind = type(message)
        counters.sent[kind] += 1
        counters.sent_bytes += nbytes
        is_for_many = False
        if kind in _SPECIAL:
            if isinstance(message, Refused):
                counters.refused[message.error.name.lower()] += 1
            elif isinstance(message, NotYet):
                counters.postponed[message.reason.name.lower()] += 1
            elif isinstance(message, StatusReport):
                report = self.status(run)
                payload = (Span(report, 0, len(report)),)
            elif isinstance(message, Attach):
                self._transport.send_with_path(effect.peer, partial(self._attach, message, epoch, run), payload)
                return
            else:
                is_for_many = kind is View or kind is ViewChange
        try:
            make = self._for_many if is_for_many else encode
            header = make(message, self._machine.incarnation, epoch, run)
        except (ProtocolError, ValueError, TypeError, OverflowError) as error:
            event(logger, logging.ERROR, "a message could not be sent", error=str(error))
            self._refuse_to_ourselves(effect.peer, message, error, run)
            return
        if not self._transport.send(effect.peer, header, payload):
            logger.debug("not sent: %s to %r", type(effect.message).__name__, effect.peer)

    def _for_many(self, message: Message, sender: int, epoch: Epoch, run: int) -> bytes:
        """The header of a message that goes to many nodes: it is encoded once."""
        said = (epoch, run)
        if said != self._latest_view:
            self._latest_view = said
            self._encoded = {}
        known = self._encoded.get(id(message))
        if known is None or known[0] is not message:
            if len(self._encoded) >= MAX_ENCODED:
                self._encoded.clear()
            known = self._encoded[id(message)] = (message, encode(message, sender, epoch, run))
        return known[1]

    def _attach(self, message: Attach, epoch: Epoch, run: int, path: PeerPath) -> bytes:
        """The header of an Attach that travels by this path."""
        said = replace(message, path=path.kind, path_reason=path.reason[:MAX_TEXT_CHARS])
        return encode(said, self._machine.incarnation, epoch, run)

    def _refuse_to_ourselves(self, peer: Peer, message: Message, error: Exception, run: int) -> None:
        request = getattr(message, "request", 0)
        if request:
            refused = Refused(request, ErrorCode.NOT_ALLOWED, f"this cannot be sent: {error}"[:1000])
            self._stepper.queue(Received(peer, self._machine.incarnation, self._machine.epoch, refused, run=run))

    def status(self, run: int) -> bytes:
        """The report as JSON. With many keys it takes long to make: those who ask again and again get the same one for
        a while, so that making reports takes a small part of this node's time."""
        now = self._stepper.now()
        until, report = self._reports.get(run, (0.0, b""))
        if now >= until:
            report = json.dumps(self._report(run)).encode()
            took_s = self._stepper.now() - now
            if len(self._reports) >= MAX_REPORTS:
                self._reports.clear()
            self._reports[run] = (now + STATUS_PAUSE * took_s if took_s > QUICK_REPORT_S else 0.0, report)
        return b'%s, "time": %.3f}' % (report[:-1], wall_clock_s())  # not as old as the rest may be

    def _report(self, run: int) -> dict[str, object]:
        """The machine's own report, with the facts of this process, how its messages travel to each server that it has
        connected to (by incarnation), and over links within its host, if it has accepted any."""
        now = self._stepper.now()
        process = {} if self._facts is None else {**self._facts.report(), "counters": self._counters.report()}
        report = {**self._machine.explain(now, run), **process}
        paths = self._transport.paths().items()
        links = [path for peer, path in paths if peer.kind is PeerKind.LINK and path.kind in WITHIN_HOST]
        to_servers = {f"{peer:016x}": path.describe() for peer, path in paths if isinstance(peer, ServerPeer)}
        own = {"links": links[0].describe()} if links else {}
        return {**report, "paths_to_servers": to_servers, **own}

"""Requests to other nodes: numbered and put into the outbox, and what their answers lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvd.core.machine import SCHEDULER, Peer, Received, Send, Span
from kvd.core.membership import ViewState, name_of
from kvd.core.outbox import Entry, Outbox
from kvd.core.refusals import error_of
from kvd.core.session import FIRST_REQUEST
from kvd.core.worker.calls import Call, CallBook
from kvd.core.worker.servers import Servers, loss_text
from kvd.errors import KvdError
from kvd.protocol.messages import ErrorCode, NodeName, Refused, Staged, Taken


class Asker:
    """Asks other nodes, and hands each answer to the part that asked."""

    def __init__(self, view: ViewState, servers: Servers, outbox: Outbox, calls: CallBook) -> None:
        self._view = view
        self._servers = servers
        self._outbox = outbox
        self._calls = calls
        self._last_request = FIRST_REQUEST

    # ── requests out ──

    def number(self) -> int:
        """The number of the next request."""
        self._last_request += 1
        return self._last_request

    def ask(
        self,
        call: Call | None,
        peer: Peer,
        message: Any,
        answered: Callable[[Received], None],
        payload: tuple[Span, ...] = (),
    ) -> None:
        """Puts a request, whose number is filled in here, into the outbox.

        Args:
            call: the call that it belongs to, which takes it along when it is abandoned; None if it stands alone.
            answered: gets the answer.
        """
        send = Send(peer, replace(message, request=self.number()), payload)
        nbytes = sum(span.nbytes for span in payload)
        siblings = None if call is None else call.entries
        self._outbox.add(Entry(send, answered, nbytes, siblings=siblings))

    def ask_all(
        self,
        call: Call | None,
        questions: Sequence[tuple[Peer, Any, tuple[Span, ...]]],
        then: Callable[[list[Received], KvdError | None], None],
    ) -> None:
        """Asks several nodes. `then` gets the answers in the order of the questions, and the first error, when all
        have answered; at once if there are no questions."""
        answers: dict[int, Received] = {}
        error: KvdError | None = None

        def answered(position: int, event: Received) -> None:
            nonlocal error
            error = error or self.error_of(event)
            answers[position] = event
            if len(answers) == len(questions):
                then([answers[number] for number in range(len(questions))], error)

        for position, (peer, message, payload) in enumerate(questions):
            self.ask(call, peer, message, partial(answered, position), payload)
        if not questions:
            then([], None)

    def gather(self, call: Call, questions: Sequence[tuple[Peer, Any, tuple[Span, ...]]]) -> None:
        """Asks several servers. The call is completed with the answers in order, or with the first error."""
        call.start()
        gone = next((error for peer, _, _ in questions if (error := self._servers.gone_error(peer)) is not None), None)
        if gone is not None:
            self._calls.complete(call, error=gone)
            return

        def then(answers: list[Received], error: KvdError | None) -> None:
            result = [(event.message, event.payload, event.nbytes) for event in answers]
            self._calls.complete(call, result, error)

        self.ask_all(call, questions, then)

    # ── answers in ──

    def answer(self, entry: Entry, event: Received, now: float) -> None:
        """Hands an answer to the part that asked. It settles the request, unless it only says where a push stands."""
        message = event.message
        if isinstance(message, Staged):
            self._outbox.mark_staged(entry, now)
            return
        if entry.pushes and isinstance(message, Refused) and is_kept(message):
            self._outbox.mark_staged(entry, now)
        else:
            self._outbox.settle(entry)
        entry.answered(event)

    def give_up(self, entry: Entry, text: str, key: str) -> None:
        """Ends a request that a server never takes, as if it were refused. What was sent may still be taken."""
        self._end(entry, 0, Refused(entry.request, ErrorCode.NOT_ALLOWED, text, key, Taken.PART))

    def fail_requests_to(self, server: int, rank: int) -> None:
        """Ends every request to a server that is gone for good, pushes included."""
        for entry in self._outbox.entries():
            if entry.send.peer == server:
                lost = (NodeName("server", rank),)
                self._end(entry, server, Refused(entry.request, ErrorCode.NODE_LOST, loss_text(rank), nodes=lost))

    def _end(self, entry: Entry, sender: int, refused: Refused) -> None:
        self._outbox.settle(entry)
        entry.answered(Received(entry.send.peer, sender, self._view.epoch, refused))

    def error_of(self, event: Received) -> KvdError | None:
        """The error that an answer stands for, if it is a refusal."""
        message = event.message
        if not isinstance(message, Refused):
            return None
        if event.peer == SCHEDULER:
            return error_of(message, "scheduler")
        ranks = {server.incarnation: server.rank for server in self._view.servers()}
        return error_of(message, name_of("server", ranks.get(event.sender, 0)))


def is_kept(refused: Refused) -> bool:
    """Whether the server keeps the push, though its caller is not to wait: a worker of its round is dead and may be
    restarted, or the workers have yet to agree on an optimizer."""
    return refused.taken is Taken.KEPT or is_of_dead_worker(refused)


def is_of_dead_worker(refused: Refused) -> bool:
    """Whether a push or pull was refused because a worker of its round is dead."""
    return refused.error is ErrorCode.NODE_LOST and bool(refused.nodes) and refused.nodes[0].role == "worker"

"""Requests to other nodes: numbered and put into the outbox, and what their answers lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from kvd.core.machine import SCHEDULER, Peer, Received, Send, Span
from kvd.core.membership import ViewState, name_of
from kvd.core.outbox import Entry, Outbox
from kvd.core.refusals import error_of
from kvd.core.session import FIRST_REQUEST
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.servers import NO_PARTITION, Servers
from kvd.errors import KvdError
from kvd.protocol.messages import Done, ErrorCode, NodeName, Refused, Staged, Taken


class Question(NamedTuple):
    """A request to another node.

    Attributes:
        message: its number is filled in when it is asked.
        partition: whose leader is asked, whoever that comes to be; NO_PARTITION if it is about the process itself.
    """

    peer: Peer
    message: Any
    payload: tuple[Span, ...] = ()
    partition: int = NO_PARTITION


class Asker:
    """Asks other nodes, and hands each answer to the part that asked.

    Attributes:
        last_request: the number that was taken last.
    """

    def __init__(self, view: ViewState, servers: Servers, outbox: Outbox, calls: CallBook) -> None:
        self._view = view
        self._servers = servers
        self._outbox = outbox
        self._calls = calls
        self.last_request = FIRST_REQUEST

    # ── requests out ──

    def number(self) -> int:
        """The number of the next request."""
        self.last_request += 1
        return self.last_request

    def ask(
        self,
        call: InFlight | None,
        peer: Peer,
        message: Any,
        answered: Callable[[Received], None],
        payload: tuple[Span, ...] = (),
        partition: int = NO_PARTITION,
    ) -> None:
        """Puts a request, whose number is filled in here, into the outbox.

        Args:
            call: the call that it belongs to, which takes it along when it is abandoned; None if it stands alone.
            answered: gets the answer.
            partition: as in Question.
        """
        send = Send(peer, replace(message, request=self.number()), payload)
        nbytes = sum(span.nbytes for span in payload)
        self._outbox.add(Entry(send, answered, nbytes, topic=partition, call=call))

    def ask_leader(
        self,
        call: InFlight | None,
        partition: int,
        message: Any,
        answered: Callable[[Received], None],
        payload: tuple[Span, ...] = (),
    ) -> None:
        """The same for the leader of a partition. If another server takes its place, the request goes there."""
        self.ask(call, self._servers.peer_of(partition), message, answered, payload, partition)

    def to_leader(self, partition: int, message: Any, payload: tuple[Span, ...] = ()) -> Question:
        """A question for the leader of a partition."""
        return Question(self._servers.peer_of(partition), message, payload, partition)

    def ask_all(
        self,
        call: InFlight | None,
        questions: Sequence[Question],
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

        for position, (peer, message, payload, partition) in enumerate(questions):
            self.ask(call, peer, message, partial(answered, position), payload, partition)
        if not questions:
            then([], None)

    def gather(self, call: InFlight, questions: Sequence[Question]) -> None:
        """Asks several servers. The call is completed with the answers in order, or with the first error."""
        call.start()
        gone = next((error for question in questions if (error := self._gone_error(question)) is not None), None)
        if gone is not None:
            self._calls.complete(call, error=gone)
            return

        def then(answers: list[Received], error: KvdError | None) -> None:
            result = [(event.message, event.payload, event.nbytes) for event in answers]
            self._calls.complete(call, result, error)

        self.ask_all(call, questions, then)

    def _gone_error(self, question: Question) -> KvdError | None:
        if question.partition == NO_PARTITION:
            return self._servers.gone_error(question.peer)
        return self._servers.orphan_error(question.partition)

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
        self._end(entry, Refused(entry.request, ErrorCode.NOT_ALLOWED, text, key, Taken.PART))

    def fail_requests(self, are_lost: Callable[[Entry], bool], rank: int) -> None:
        """Ends requests to a server that is gone for good, pushes included."""
        lost, text = (NodeName("server", rank),), self._servers.loss_text(rank)
        for entry in self._outbox.entries():
            if are_lost(entry) and self._outbox.find(entry.request) is entry:  # the end of one may end others
                self._end(entry, Refused(entry.request, ErrorCode.NODE_LOST, text, nodes=lost))

    def excuse(self, entry: Entry) -> None:
        """Ends a request that its server need not carry out any more, as if it were done."""
        self._end(entry, Done(entry.request))

    def _end(self, entry: Entry, answer: Refused | Done) -> None:
        self._outbox.settle(entry)
        entry.answered(Received(entry.peer, 0, self._view.epoch, answer))

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

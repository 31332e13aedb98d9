"""Answers of commands, which must not be carried out twice."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from kvd.protocol.messages import ErrorCode, Refused

MAX_REMEMBERED = 256  # answers kept per incarnation
MAX_REMEMBERED_BYTES = 16 << 20  # of results, of all senders
MAX_RUNNING_BYTES = 256 << 20  # of the bodies of commands that wait or run; one is taken in any case
MAX_SENDERS = 1024  # incarnations whose answers are kept; those of the command line come and go unannounced


class CommandAnswers:
    """Which commands were started, and what they were answered, by sender and number.

    The oldest answers of a sender are forgotten, and so are the senders that have been silent for longest. Of large
    results the oldest are replaced by a refusal: what was carried out is not carried out again.
    """

    def __init__(self) -> None:
        self._by_sender: OrderedDict[int, OrderedDict[int, Any]] = OrderedDict()
        self._running = 0
        self._running_bytes = 0
        self._results: deque[tuple[int, int, int]] = deque()  # sender, number and size of those that have a result
        self._result_bytes = 0

    def may_run(self, nbytes: int) -> bool:
        """Whether a command with a body of this size may be started now."""
        return not self._running or self._running_bytes + nbytes <= MAX_RUNNING_BYTES

    def runs(self, nbytes: int) -> None:
        """A command with a body of this size was started."""
        self._running += 1
        self._running_bytes += nbytes

    def ran(self, nbytes: int) -> None:
        """It has ended."""
        self._running -= 1
        self._running_bytes -= nbytes

    def is_known(self, sender: int, request: int) -> bool:
        """Whether the command was started."""
        return request in self._by_sender.get(sender, ())

    def start(self, sender: int, request: int) -> bool:
        """True if the command is new; it is running from now on."""
        answers = self._by_sender.setdefault(sender, OrderedDict())
        self._by_sender.move_to_end(sender)
        while len(self._by_sender) > MAX_SENDERS:
            self._by_sender.popitem(last=False)
        if request in answers:
            return False
        answers[request] = None
        while len(answers) > MAX_REMEMBERED:
            answers.popitem(last=False)
        return True

    def finish(self, sender: int, request: int, answer: Any, nbytes: int = 0) -> None:
        """Remembers the answer, which has a result of this size."""
        answers = self._by_sender.get(sender)
        if answers is None or request not in answers:
            return
        answers[request] = answer
        if nbytes:
            self._results.append((sender, request, nbytes))
            self._result_bytes += nbytes
        while self._result_bytes > MAX_REMEMBERED_BYTES:
            self._drop_oldest_result()

    def _drop_oldest_result(self) -> None:
        sender, request, nbytes = self._results.popleft()
        self._result_bytes -= nbytes
        answers = self._by_sender.get(sender)
        answer = None if answers is None else answers.get(request)
        if answers is not None and answer is not None:
            text = "this command was carried out before, and its result is not kept any more"
            gone = Refused(request, ErrorCode.NOT_ALLOWED, text)
            answers[request] = answer._replace(message=gone, payload=())

    def find(self, sender: int, request: int) -> Any:
        """The answer, or None while the command runs."""
        answers = self._by_sender.get(sender)
        return None if answers is None else answers.get(request)

    def drop_sender(self, sender: int) -> None:
        self._by_sender.pop(sender, None)

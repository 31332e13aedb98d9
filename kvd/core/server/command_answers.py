"""Answers of commands, which must not be carried out twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MAX_REMEMBERED = 256  # answers kept per incarnation
MAX_SENDERS = 1024  # incarnations whose answers are kept; those of the command line come and go unannounced


class CommandAnswers:
    """Which commands were started, and what they were answered, by sender and number.

    The oldest answers of a sender are forgotten, and so are the senders that have been silent for longest.
    """

    def __init__(self) -> None:
        self._by_sender: OrderedDict[int, OrderedDict[int, Any]] = OrderedDict()

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

    def finish(self, sender: int, request: int, answer: Any) -> None:
        answers = self._by_sender.get(sender)
        if answers is not None and request in answers:
            answers[request] = answer

    def find(self, sender: int, request: int) -> Any:
        """The answer, or None while the command runs."""
        answers = self._by_sender.get(sender)
        return None if answers is None else answers.get(request)

    def drop_sender(self, sender: int) -> None:
        self._by_sender.pop(sender, None)

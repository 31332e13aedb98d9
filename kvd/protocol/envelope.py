"""Envelope of every header: the fields before those of the message."""

from __future__ import annotations

from typing import NamedTuple

from kvd.protocol.messages import Epoch, Message

VERSION = 12


class Decoded(NamedTuple):
    """A message, and what its header says about the sender."""

    sender: int
    epoch: Epoch
    message: Message
    run: int

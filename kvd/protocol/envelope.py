"""What every header begins with, and what is read of it."""

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

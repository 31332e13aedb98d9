"""What an attack is: a function that does one kind of harm to each daemon of a target, and a name in a table.

`handshakes` and `wire_frames` are what strangers do: bytes over plain sockets. With keys, nothing after the greeting
may get through. `insiders` is what holders of a key do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from tests.fuzz.target import Target
from tests.fuzz.zmtp import Wire, greeting, ready


@dataclass(frozen=True)
class Force:
    """How hard an attack is.

    Attributes:
        rounds: how often it is made at each address.
        peers: how many connections it holds at the same time, where that is what it does.
        seconds: how long it goes on, where that is what it does.
        nbytes: how much it sends, where that is what it does.
    """

    rounds: int = 1
    peers: int = 40
    seconds: float = 1.0
    nbytes: int = 4 << 20


@dataclass(frozen=True)
class Assault:
    """What an attack works with."""

    target: Target
    random: Random
    force: Force

    def addresses(self) -> Iterator[str]:
        """Each address of the target, as often as the force says."""
        for _ in range(self.force.rounds):
            yield from self.target.addresses

    def peer(self, address: str, identity: bytes = b"") -> Wire:
        """A connection after the handshake of a DEALER without a key; that fails where keys are asked for."""
        wire = Wire(address)
        wire.send(greeting() + ready(identity=identity))
        heard = wire.read_until(b"ROUTER", timeout_s=0.05 if self.target.is_closed else 10.0)
        assert not (self.target.is_closed and b"ROUTER" in heard), "a stranger came in without a key"
        return wire


Attack = Callable[[Assault], int]
"""Makes the attack; gives the number of times."""

ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Puts a function into the table."""

    def enter(function: Attack) -> Attack:
        assert name not in ATTACKS, name
        ATTACKS[name] = function
        return function

    return enter

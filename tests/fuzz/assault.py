"""What an attack is: a function that does one kind of harm to each daemon of a target, and a name in a table.

`handshakes` and `wire_frames` are what strangers do: bytes over plain sockets. With keys, nothing after the greeting
may get through. `sealed_frames` and `insiders` are what holders of a key do, by hand and with libzmq; what strangers do
after a handshake without keys is tried with a key, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from tests.fuzz.curve import CurveDealer
from tests.fuzz.target import Target
from tests.fuzz.zmtp import Dealer, greeting, ready

WITH_A_KEY = ", with a key"


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
    """What an attack works with.

    Attributes:
        has_key: whether it is made by somebody who has a key, if there are any.
    """

    target: Target
    random: Random
    force: Force
    has_key: bool = False

    def addresses(self) -> Iterator[str]:
        """Each address of the target, as often as the force says."""
        for _ in range(self.force.rounds):
            yield from self.target.addresses

    def peer(self, address: str, identity: bytes = b"") -> Dealer:
        """A connection after the handshake of a DEALER. Without a key, that fails where keys are asked for."""
        if self.has_key:
            return self.holder(address, identity)
        wire = Dealer(address)
        wire.send(greeting() + ready(identity=identity))
        heard = wire.read_until(b"ROUTER", timeout_s=0.05 if self.target.is_closed else 10.0)
        assert not (self.target.is_closed and b"ROUTER" in heard), "a stranger came in without a key"
        return wire

    def holder(self, address: str, identity: bytes = b"", *, properties: bytes | None = None) -> CurveDealer:
        """A connection with a key: that of the cluster, that of a worker, and so on in turn.

        Raises:
            RefusedError: the daemon does not go on with the handshake.
        """
        return CurveDealer(address, next(self.target.keys), identity, properties=properties)


Attack = Callable[[Assault], int]
"""Makes the attack; gives the number of times."""

ATTACKS: dict[str, Attack] = {}
NEED_KEYS: set[str] = set()
"""Those that are made with a key and frames by hand, on daemons with keys."""


def attack(name: str, *, by_holders: bool = False) -> Callable[[Attack], Attack]:
    """Puts a function into the table; `by_holders`: once more, made with a key."""

    def enter(function: Attack) -> Attack:
        _enter(name, function)
        if by_holders:
            _enter_sealed(name + WITH_A_KEY, function)
        return function

    return enter


def sealed_attack(name: str) -> Callable[[Attack], Attack]:
    """Puts a function into the table that makes its attack with a key, and only so."""

    def enter(function: Attack) -> Attack:
        _enter_sealed(name, function)
        return function

    return enter


def _enter_sealed(name: str, function: Attack) -> None:
    _enter(name, lambda assault: function(replace(assault, has_key=True)))
    NEED_KEYS.add(name)


def _enter(name: str, function: Attack) -> None:
    assert name not in ATTACKS, name
    ATTACKS[name] = function


def attacks(*, insecure: bool) -> list[str]:
    """The names of those that can be made on daemons with keys, or without."""
    return [name for name in ATTACKS if not (insecure and name in NEED_KEYS)]

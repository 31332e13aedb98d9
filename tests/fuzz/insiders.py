"""What those do who may speak: messages that are valid, and mean harm. Without keys, that is everybody."""

from __future__ import annotations

import time
from random import Random
from typing import Any

from kvd.errors import ProtocolError
from kvd.protocol.codec import encode
from kvd.protocol.messages import (
    ANY_CLOCK,
    BIGGEST,
    Command,
    EndRun,
    Epoch,
    Join,
    Part,
    Pull,
    SetOptimizer,
    Shutdown,
    StatusQuery,
    StoreState,
    UpdateOptimizer,
)
from tests.fuzz.assault import Assault, attack
from tests.fuzz.job import QUIET_KEY
from tests.fuzz.making import KINDS, Maker
from tests.fuzz.peers import Insider

ALLOWED = (Shutdown, EndRun, Join, SetOptimizer, UpdateOptimizer, StoreState, Command)
"""Messages with which the holder of the cluster's key may end or change a job: to send them is no attack."""

HARMFUL = [kind for kind in KINDS if kind not in ALLOWED]


def arbitrary_message(maker: Maker, random: Random) -> list[bytes]:
    """A message of any kind from nobody we know, for no run or for one that is over, and perhaps a payload."""
    while True:
        message: Any = maker.message(HARMFUL)
        sender, run = random.getrandbits(61) + 1, random.choice((0, random.getrandbits(61) + 1))
        epoch = Epoch(random.choice((0, 1, BIGGEST)), random.choice((0, 1, 7, BIGGEST)))
        try:
            header = encode(message, sender, epoch, run)
        except (ProtocolError, OverflowError):  # too long, or plain data that msgpack does not have
            continue
        return [header] if random.random() < 0.5 else [header, random.randbytes(random.choice((0, 8, 300)))]


@attack("messages with arbitrary fields, of runs that are over")
def arbitrary_messages(assault: Assault) -> int:
    maker, count = Maker(assault.random), 0
    for address in assault.addresses():
        with Insider(assault.target, address) as peer:
            for _ in range(assault.force.peers * 5):
                peer.send(*arbitrary_message(maker, assault.random))
                count += 1
            peer.hear()
    return count


@attack("messages that are none, sent with a key")
def no_messages(assault: Assault) -> int:
    count = 0
    query = encode(StatusQuery(7), 0x1234, Epoch(0, 0))
    for address in assault.addresses():
        with Insider(assault.target, address) as peer:
            noise = assault.random.randbytes(80)
            for parts in ((b"",), (b"", b""), (query, b"payload", b"more"), (noise,), (query,) * 300):
                for _ in range(20):
                    peer.send(*parts)
                    count += 1
            peer.hear()
    return count


@attack("headers that promise more than they hold")
def promises(assault: Assault) -> int:
    count = 0
    for address in assault.addresses():
        with Insider(assault.target, address) as peer:
            for opening in (b"\xdc\x0f\xff", b"\xdc\xff\xfd", b"\x91", b"\x81\xa0"):
                for nbytes in (4 << 10, 64 << 10):
                    for _ in range(20):
                        peer.send((opening * nbytes)[:nbytes])
                        count += 1
            peer.hear()
    return count


@attack("answers that nobody reads, asked for with a key")
def unread_answers(assault: Assault) -> int:
    """Questions as fast as they are taken, and no answer read; then the connection is closed."""
    count = 0
    query = encode(StatusQuery(7), 0x1234, Epoch(0, 0))
    for address in assault.addresses():
        with Insider(assault.target, address, unread=1) as peer:
            most = count + assault.force.nbytes // 100
            while count < most and peer.send(query):
                count += 1
            time.sleep(assault.force.seconds)  # time itself: what is sent leaves in the background
    return count


@attack("one slice named a hundred times in a pull")
def repeated_slices(assault: Assault) -> int:
    return _pull_unread(assault, assault.force.peers, 100)


@attack("a key pulled again and again, no answer read")
def unread_values(assault: Assault) -> int:
    return _pull_unread(assault, assault.force.nbytes >> 13, 1)


def _pull_unread(assault: Assault, pulls: int, times: int) -> int:
    """Pulls of one slice, named so often in each."""
    count, run = 0, assault.target.run()
    for address in assault.addresses():
        with Insider(assault.target, address, unread=1) as peer:
            for number in range(pulls):
                if not peer.say(Pull(number + 1, (Part(QUIET_KEY, 0, ANY_CLOCK),) * times), run=run):
                    break
                count += 1
            time.sleep(assault.force.seconds)  # time itself: the attack lasts
    return count

"""A process with a HostTransport that obeys the headers of messages, as a server that is connected to others.

The script takes the incarnation under which it listens, and `plain` if it is to share no memory. Its address is the
first line that it prints.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from kvd.core.machine import Peer, PeerKind, ServerPeer, Span
from kvd.core.principals import Principal
from kvd.transport.host import HostTransport


class PeerProcess:
    """`keep` keeps the payload, `drop` drops all kept ones, `leaseN` answers with N bytes of its own shared memory. All
    other messages are echoed.

    `connect INCARNATION ADDRESS` connects to another server, to which `pass` sends the payload on, and `lendN` sends N
    bytes of its own shared memory. `stream COUNT NBYTES OPEN` sends it so many messages of this size, of which at most
    OPEN wait for an answer.
    """

    def __init__(self, **options: Any) -> None:
        self.transport = HostTransport(**options)
        self.kept: list[memoryview | None] = []
        self.other: ServerPeer | None = None
        self.to_send = 0
        self.block: Any = None

    def take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
        if peer.kind is PeerKind.SERVER:
            self.stream_on()
        elif self.other is not None or header.startswith(b"connect"):
            self.obey_to_other(peer, header, payload)
        elif header == b"keep":
            self.kept.append(payload)
            self.transport.send(peer, b"kept", [])
        elif header == b"drop":
            self.kept.clear()
        elif header.startswith(b"lease"):
            block = self.transport.arena.allocate(int(header[5:]))
            assert block is not None
            block[:] = 77
            self.transport.send(peer, b"leased", [Span(block, 0, block.nbytes)])
        else:
            spans = [] if payload is None else [Span(payload, 0, payload.nbytes)]
            self.transport.send(peer, header, spans)

    def obey_to_other(self, peer: Peer, header: bytes, payload: memoryview | None) -> None:
        """To do with another server."""
        word, *numbers = header.split()
        if word == b"connect":
            self.other = ServerPeer(int(numbers[0]))
            self.transport.connect(self.other, numbers[1].decode())
        elif word == b"pass":
            assert payload is not None
            self.send_to_other(b"passed", payload)
        elif word.startswith(b"lend"):
            block = self.transport.arena.allocate(int(word[4:]))
            assert block is not None
            block[:] = 77
            self.send_to_other(b"lent", block)
        elif word == b"stream":
            count, nbytes, most_open = map(int, numbers)
            self.block = bytearray(nbytes)
            self.to_send = count
            for _ in range(most_open):
                self.stream_on()
        self.transport.send(peer, b"done", [])

    def stream_on(self) -> None:
        """One message has been answered: the next may follow."""
        if self.to_send:
            self.to_send -= 1
            self.send_to_other(b"%d" % self.to_send, self.block)

    def send_to_other(self, header: bytes, body: Any) -> None:
        assert self.other is not None
        self.transport.send(self.other, header, [Span(body, 0, memoryview(body).nbytes)])

    async def run(self, incarnation: int) -> None:
        self.transport.start(self.take, lambda peer, text: print("garbage", text, flush=True))
        address = self.transport.listen("tcp://127.0.0.1:0")
        self.transport.listen_links(incarnation)
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the test closes it
        self.transport.close(0.1)


if __name__ == "__main__":
    asyncio.run(PeerProcess(shared_memory="plain" not in sys.argv).run(int(sys.argv[1])))

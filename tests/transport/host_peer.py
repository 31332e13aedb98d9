"""A process with a HostTransport that obeys the headers of messages.

The script takes the incarnation under which it listens. Its address is the first line that it prints.
"""

from __future__ import annotations

import asyncio
import sys

from kvd.core.machine import Peer, Span
from kvd.core.principals import Principal
from kvd.transport.host import HostTransport


class PeerProcess:
    """`keep` keeps the payload, `drop` drops all kept ones, `leaseN` answers with N bytes of its own shared memory. All
    other messages are echoed."""

    def __init__(self) -> None:
        self.transport = HostTransport()
        self.kept: list[memoryview | None] = []

    def take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
        if header == b"keep":
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

    async def run(self, incarnation: int) -> None:
        self.transport.start(self.take, lambda peer, text: print("garbage", text, flush=True))
        address = self.transport.listen("tcp://127.0.0.1:0")
        self.transport.listen_links(incarnation)
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the test closes it
        self.transport.close(0.1)


if __name__ == "__main__":
    asyncio.run(PeerProcess().run(int(sys.argv[1])))

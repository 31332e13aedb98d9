"""The ids that libzmq gives to those who connect: why nobody may know which comes next."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys

from kvd.core.machine import SCHEDULER
from tests.fuzz.zmtp import Wire, dealer, message
from tests.transport.test_curve import nodes
from tests.waiting import eventually

ROUTER = """
import zmq
router = zmq.Context().socket(zmq.ROUTER)
print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while True:
    print(router.recv_multipart()[0].hex(), flush=True)
"""
AHEAD = 5


def first_id() -> bytes:
    """Of the first one who connects to a listener, in a process that libzmq finds as if it had just begun."""
    ctypes.CDLL(None).srand(1)

    async def main() -> bytes:
        async with nodes(None, None) as (server, client):
            client.transport.connect(SCHEDULER, server.transport.listen("tcp://127.0.0.1:0"))
            client.transport.send(SCHEDULER, b"hello", [])
            await eventually(lambda: bool(server.callers))
            (caller,) = server.callers
            assert isinstance(caller, bytes)
            return caller

    return asyncio.run(main())


def test_ids_do_not_begin_at_the_same_number_in_every_process() -> None:
    ids = {first_id() for _ in range(3)}
    assert len(ids) == 3
    assert all(len(one) == 5 and one[0] == 0 for one in ids)


def test_libzmq_ends_a_process_when_its_counter_reaches_an_id_that_a_peer_has_chosen() -> None:
    """The reason. When this fails, libzmq has mended it, and docs/security.md may say so."""
    with subprocess.Popen(
        [sys.executable, "-c", ROUTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = f"tcp://127.0.0.1:{int(process.stdout.readline())}"
        held: list[Wire] = []

        def said(identity: bytes = b"") -> bytes:
            held.append(dealer(address, identity))
            held[-1].send(message(b"hello"))
            return bytes.fromhex(process.stdout.readline().strip())  # type: ignore[union-attr]

        first = said()
        chosen = b"\0" + ((int.from_bytes(first[1:], "big") + AHEAD) % (1 << 32)).to_bytes(4, "big")
        assert said(chosen) == chosen
        others = [said() for _ in range(AHEAD - 1)]
        assert others == sorted(others)
        assert said() == b""  # it is gone
        assert "Assertion failed: ok" in process.stderr.read()
        assert process.wait(20) < 0
        for wire in held:
            wire.close()

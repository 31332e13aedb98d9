"""A client and a server with a link over TCP between them, sealed or, without keys, plain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvd.core.machine import ServerPeer
from kvd.protocol.messages import PathKind
from kvd.transport.links.listener import TcpLinks
from kvd.transport.zmq.curve import Curve
from tests.transport.host_harness import Node, cluster_keys, connected, run

KEYS = cluster_keys()


def kind_of(keys: Curve | None) -> PathKind:
    """What a link over TCP is between nodes with these keys, or with none."""
    return PathKind.PLAIN_TCP if keys is None else PathKind.SEALED_TCP


def tcp_node(curve: Curve | None = KEYS) -> Node:
    return Node(shared_memory=False, tcp_links=TcpLinks.EVERYWHERE, curve=curve)


@asynccontextmanager
async def tcp_pair(
    server_keys: Curve | None = KEYS, client_keys: Curve | None = KEYS
) -> AsyncIterator[tuple[Node, Node, ServerPeer]]:
    """A client and a server with a link over TCP, and the server's incarnation."""
    async with connected(tcp_node(client_keys), tcp_node(server_keys)) as nodes:
        yield nodes


def with_pair(program: Callable[[Node, Node, ServerPeer], Awaitable[None]], keys: Curve | None = KEYS) -> None:
    async def main() -> None:
        async with tcp_pair(keys, keys) as (client, server, incarnation):
            assert client.transport.paths()[incarnation] == (kind_of(keys), "")
            await program(client, server, incarnation)

    run(main)

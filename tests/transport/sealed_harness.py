"""A client and a server with a sealed link between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvd.core.machine import ServerPeer
from kvd.protocol.messages import PathKind
from kvd.transport.curve import Curve
from kvd.transport.link_listener import TcpLinks
from tests.transport.host_harness import Node, cluster_keys, connected, run

KEYS = cluster_keys()


def sealed_node(curve: Curve | None = KEYS) -> Node:
    return Node(shared_memory=False, tcp_links=TcpLinks.EVERYWHERE, curve=curve)


@asynccontextmanager
async def sealed_pair(
    server_keys: Curve | None = KEYS, client_keys: Curve | None = KEYS
) -> AsyncIterator[tuple[Node, Node, ServerPeer]]:
    """A client and a server with a sealed link, and the server's incarnation."""
    async with connected(sealed_node(client_keys), sealed_node(server_keys)) as nodes:
        yield nodes


def with_pair(program: Callable[[Node, Node, ServerPeer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with sealed_pair() as (client, server, incarnation):
            assert client.transport.paths()[incarnation] == (PathKind.SEALED_TCP, "")
            await program(client, server, incarnation)

    run(main)

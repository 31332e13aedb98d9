"""The options of every ZeroMQ socket: bounds, and no option that lets a peer end this process."""

from __future__ import annotations

from typing import Final

import zmq

MAX_FRAME_BYTES: Final = 256 << 10  # larger payloads travel in several; a header has 64 KiB at most
FRAME_OVERHEAD_BYTES: Final = 9 + 33  # the most that ZMTP and CURVE add to a frame
SEND_HIGH_WATER_MARK: Final = 20_000  # messages that wait for one peer
RECONNECT_FIRST_MS: Final = 50
RECONNECT_LIMIT_MS: Final = 2000
CONNECT_LIMIT_MS: Final = 5000  # the kernel tries an address that does not answer for two minutes
HANDSHAKE_LIMIT_MS: Final = 5000
SILENCE_LIMIT_MS: Final = 20_000  # until a connection to a host that does not answer is given up
KEEPALIVE_S: Final = 5  # until a silent connection is probed, and between two probes
KEEPALIVE_PROBES: Final = SILENCE_LIMIT_MS // 1000 // KEEPALIVE_S - 1  # with the silence before them


def set_options(socket: zmq.Socket[bytes], address: str) -> None:
    """Sets them before the socket is bound or connected to the address.

    The limit of a frame is that of a handshake as well, before anybody's key is checked: libzmq keeps the properties
    that the other end sends in as many pieces as there are, of 100 bytes and more each, and made 672 MB of 16 MB.

    libzmq 4.3.5 aborts with "Assertion failed: !_io_error" when a connection ends whose input it has stopped, and
    anything is then written to it: a heartbeat of ours, or the answer to one of the peer's. It stops the input of a
    connection whose queue is full, so a peer that sends more than is read, and leaves, ends the process. A stopped
    connection that is opened again gives "Assertion failed: _input_stopped" (issue 3937 of libzmq). So queues of
    received messages have no high-water mark: input never stops. ZeroMQ's heartbeats are off, since their timer does
    not look whether a connection has failed; the kernel's keepalive and TCP_USER_TIMEOUT find hosts that are gone
    within the same time. With a mark of 1000, a flood with heartbeats in it ended a bare ROUTER in 17 of 20 runs, and
    in 19 of 20 without heartbeats of its own; without a mark in none of 80.

    What a peer may make this process keep is bounded in `kvd.transport.limits.quotas` instead. A routing id that is
    taken stays with its owner (ROUTER_HANDOVER is off): libzmq never closes the descriptor of a connection that lost
    its id.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + FRAME_OVERHEAD_BYTES)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, SILENCE_LIMIT_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_LIMIT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_LIMIT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
    socket.setsockopt(zmq.IPV6, int("[" in address))

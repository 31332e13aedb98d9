"""Refuses new connections before they cost anything: the kernel drops their first packet at the listening socket.

The filter is a program of the classic Berkeley packet filter (SO_ATTACH_FILTER, socket(7)), which needs no privileges.
It sees the packets to the listening socket, from the TCP header on. Sockets that are accepted inherit it, so it passes
whatever is not the first packet of a connection. Whoever is refused tries again after a second, as for a packet that
was lost.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from kvd.transport.limits.connection_rate_limit import ANYWHERE, THIS_HOST, Place

MAX_REFUSED: Final = 256  # with more, all newcomers are

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of Linux; the socket module does not name them

# Of linux/filter.h: what to do, and where the IP header begins.
_LOAD_BYTE, _LOAD_WORD, _AND = 0x30, 0x20, 0x54
_SKIP_UNLESS_EQUAL, _SKIP, _RETURN = 0x15, 0x05, 0x06
_IP = 0xFFF00000
_PASS, _DROP = 0xFFFFFFFF, 0

_FLAGS_AT, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12  # of the TCP header
_IPV4_FROM, _IPV6_FROM = _IP + 12, _IP + 8

_INSTRUCTION = struct.Struct("@HBBI")
_PROGRAM = struct.Struct("@HP")

_Program = list[tuple[int, int, int]]  # what to do, how many to skip unless equal, with which number


def program(refused: Collection[Place]) -> bytes:
    """Drops what opens a connection from one of these places."""
    if ANYWHERE in refused or len(refused) > MAX_REFUSED:
        body: _Program = [(_RETURN, 0, _DROP)]
    else:
        ipv4 = [step for place in sorted(refused) if len(place) == 4 for step in _unless_from_ipv4(place)]
        ipv6 = [step for place in sorted(refused) if len(place) == 8 for step in _unless_from_ipv6(place)]
        body = [(_LOAD_BYTE, 0, _IP), (_AND, 0, 0xF0), (_SKIP_UNLESS_EQUAL, 1, 0x40), (_SKIP, 0, len(ipv6) + 1)]
        body += [*ipv6, (_RETURN, 0, _PASS), *ipv4, (_RETURN, 0, _PASS)]
    start: _Program = [(_LOAD_BYTE, 0, _FLAGS_AT), (_AND, 0, _SYN_OR_ACK), (_SKIP_UNLESS_EQUAL, 1, _SYN)]
    start += [(_SKIP, 0, 1), (_RETURN, 0, _PASS)]
    return b"".join(_INSTRUCTION.pack(code, 0, skipped, number) for code, skipped, number in [*start, *body])


def _unless_from_ipv4(place: Place) -> _Program:
    first = (_LOAD_BYTE, 0, _IPV4_FROM) if place == THIS_HOST else (_LOAD_WORD, 0, _IPV4_FROM)
    number = place[0] if place == THIS_HOST else int.from_bytes(place, "big")
    return [first, (_SKIP_UNLESS_EQUAL, 1, number), (_RETURN, 0, _DROP)]


def _unless_from_ipv6(place: Place) -> _Program:
    high, low = struct.unpack("!II", place)
    return [
        (_LOAD_WORD, 0, _IPV6_FROM),
        (_SKIP_UNLESS_EQUAL, 3, high),
        (_LOAD_WORD, 0, _IPV6_FROM + 4),
        (_SKIP_UNLESS_EQUAL, 1, low),
        (_RETURN, 0, _DROP),
    ]


class SynFilter:
    """The filter of one listening socket.

    Args:
        listener: a descriptor of it, which is not kept.
    """

    def __init__(self, listener: int) -> None:
        self._socket = socket.socket(fileno=os.dup(listener))

    def refuse(self, places: Collection[Place]) -> None:
        """From now on these places are refused, and no others. Where the system has no such filters, nobody is."""
        with suppress(OSError):
            if not places:
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                return
            code = program(places)
            buffer = ctypes.create_string_buffer(code, len(code))
            packed = _PROGRAM.pack(len(code) // _INSTRUCTION.size, ctypes.addressof(buffer))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, packed)

    def close(self) -> None:
        """To be called before the listening socket is closed: until then, the port stays taken."""
        self.refuse(())
        self._socket.close()

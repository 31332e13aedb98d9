"""What the peers that connect to this process may make it keep in the queues of libzmq.

libzmq bounds its queues by numbers of messages only. It assembles a message of any number of frames, and its queues of
received messages must not have a mark at all (`kvd.transport.zmq.socket_options` says why). So bytes are counted here,
for each connection over TCP:

- *unread* is what the kernel has received, less what was handed out: messages that wait for this process, and what has
  arrived of one that is not complete.
- *unsent* is what was sent, less what the other end has acknowledged. Payloads by reference are not counted as memory:
  they are versions of slices, which the server has anyway, unless the other end does not read at all.

A message to a peer with too much unsent is dropped: a peer that reads asks again. A peer is cut off that has too much
unread, or does not read what it was sent, or that has most of both when this process has more memory than it may have.
A peer that is cut off by mistake connects again, and sends again what was not answered.

libzmq hands out all that has arrived over a connection, also when that has ended. A peer that leaves has heard the
answers to nearly all that it sent. What is left of one that has not is dropped after some messages, so that nobody
works for a flood whose sender has gone, and its memory is free soon.

Connections over ipc are not counted, since the kernel counts no bytes for them: the owner of the socket's folder
decides who may connect.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.protocol.specs import MAX_PAYLOAD_BYTES
from kvd.transport.limits.connections import ConnectionState, accepted_at, cut_off, look_at
from kvd.transport.limits.process_memory import MemoryWatch

UNSENT_LIMIT_BYTES = 64 << 20  # of copies that wait for one peer
LOOK_AGAIN_BYTES = 4 << 20  # sent to one peer between two looks at its connection
STALLED_LIMIT_S = 10.0  # until a peer is cut off that has too much unsent, and takes nothing
UNREAD_LIMIT_BYTES = 2 * MAX_PAYLOAD_BYTES  # of one peer
UNREAD_SHARE = 8  # or this part of the memory that the process may have, if that is more
LARGE_BYTES = 40 << 20  # a peer has less waiting, while it is within its credit
NOTABLE_BYTES = 128 << 10  # half of the largest handshake
AMPLIFICATION = 64  # libzmq's memory for a byte, at most: 32 in frames without content, 42 in properties of handshakes
LOOK_AGAIN_MESSAGES = 1024  # of one peer between two looks whether its connection has ended
FIRST_TIDY = 1024  # accounts, until those of connections that have ended are forgotten
LENT_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0

logger = logging.getLogger("kvd.transport")


@dataclass(slots=True, eq=False)
class Account:
    """What one connection has carried, in bytes.

    What ZeroMQ adds on the wire is counted so that rather too little seems to wait than too much: `note` puts it right
    whenever the kernel shows that it was too little.
    """

    cookie: int
    descriptor: int
    delivered: int = 0  # that were handed out, with the most that ZeroMQ adds
    messages: int = 0  # that were handed out
    sent: int = 0  # that were given to libzmq, without what it adds
    acknowledged: int = 0  # by the other end, at the last look
    looked_at_sent: int = 0  # `sent` at the last look
    lent: deque[tuple[int, int]] = field(default_factory=deque)  # payloads by reference: `sent` behind each, its size
    lent_bytes: int = 0  # of those that are not acknowledged
    stalled_since: float | None = None  # when it was first found with something unsent, and to have taken nothing
    has_ended: bool = False  # as found after `LOOK_AGAIN_MESSAGES`
    messages_after_end: int = -1  # `messages` when all accounts were looked at, and its connection had ended
    is_cut_off: bool = False

    @property
    def unsent_copies(self) -> int:
        return max(0, self.sent - self.acknowledged - self.lent_bytes)

    def note(self, state: ConnectionState, now: float) -> None:
        """Takes over what the kernel says. Nothing waits to be sent when the kernel has nothing left to send."""
        if state.is_idle or state.acknowledged >= self.sent:
            self.sent = state.acknowledged
        if state.acknowledged > self.acknowledged or self.sent == state.acknowledged:
            self.stalled_since = None
        elif self.stalled_since is None:
            self.stalled_since = now
        self.acknowledged = state.acknowledged
        self.looked_at_sent = self.sent
        while self.lent and (self.lent[0][0] <= state.acknowledged or self.sent == state.acknowledged):
            self.lent_bytes -= self.lent.popleft()[1]
        self.delivered = min(self.delivered, state.received)

    def is_stalled(self, now: float, limit_s: float) -> bool:
        """Whether it has taken nothing for so long."""
        return self.stalled_since is not None and now - self.stalled_since > limit_s


class _Taken(NamedTuple):
    """What waits of and for one peer, without what was lent to it."""

    nbytes: int
    state: ConnectionState
    account: Account


class Quotas:
    """The accounts of those that are connected to one port.

    `received` and `watch` belong to the thread of the loop, `may_send` and `sent` to whoever holds the lock of the
    socket. Nothing is counted until `open`.

    Args:
        memory: of this process.
        clock: seconds.

    Attributes:
        is_open: whether anything is counted.
    """

    def __init__(self, memory: MemoryWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_open = False
        self._memory = memory
        self._clock = clock
        self._port = 0
        self._accounts: dict[bytes, Account] = {}  # by routing id
        self._by_cookie: dict[int, Account] = {}
        self._tidy_at = FIRST_TIDY
        self._lent_at = 0.0  # not before then another peer is cut off for what was lent to it
        self._log_at = 0.0

    def open(self, port: int) -> None:
        """Counts the connections to this port, where the process listens from now on."""
        self.is_open = True
        self._port = port
        self._memory.start()

    def close(self) -> None:
        self.is_open = False
        self._memory.stop()

    # ── messages ──

    def received(self, route: bytes, nbytes: int, descriptor: Callable[[], int]) -> bool:
        """Counts a message that was handed out. False: its sender was cut off, and it is to be dropped. `descriptor`
        says over which one it came."""
        account = self._accounts.get(route)
        if account is None:
            account = self._accounts[route] = self._open(descriptor())
        account.delivered += nbytes
        account.messages += 1
        if account.messages % LOOK_AGAIN_MESSAGES == 0:
            self._look_for_end(account)
        return not account.is_cut_off

    def _look_for_end(self, account: Account) -> None:
        """Drops the rest of what a peer has sent if, at its end, more than `LOOK_AGAIN_MESSAGES` were unread."""
        if account.is_cut_off or not account.cookie:
            return
        had_ended, now = account.has_ended, self._clock()
        account.has_ended = self._look(account, now) is None
        if had_ended and account.has_ended:
            account.is_cut_off = True
            logger.warning("dropped what is left of a peer that has gone: it had not waited for the answers")

    def _open(self, descriptor: int) -> Account:
        """The account of a connection that has sent its first message. If it has ended meanwhile, the descriptor may be
        another one's, which is then counted a little too well."""
        state = look_at(descriptor)
        cookie = 0 if state is None else state.cookie
        account = self._by_cookie.get(cookie)
        if account is None:
            account = self._by_cookie[cookie] = Account(cookie, descriptor)
        return account

    def may_send(self, route: bytes) -> bool:
        """Whether a message may be sent: not if too much waits already."""
        account = self._accounts.get(route)
        if account is None:
            return True  # nothing has come from it: libzmq does not know it either
        if account.sent - account.looked_at_sent > LOOK_AGAIN_BYTES or account.unsent_copies > UNSENT_LIMIT_BYTES:
            now = self._clock()
            state = self._look(account, now)
            if state is not None and account.unsent_copies > UNSENT_LIMIT_BYTES:
                if account.is_stalled(now, STALLED_LIMIT_S):
                    waits = f"{account.unsent_copies >> 20} MiB wait for it, and it reads nothing"
                    self._cut_off(account, state, now, waits)
                return False
        return not account.is_cut_off

    def sent(self, route: bytes, nbytes: int, lent_bytes: int) -> None:
        """Counts a message that libzmq has taken, of which `lent_bytes` are a reference."""
        account = self._accounts.get(route)
        if account is not None:
            account.sent += nbytes
            if lent_bytes:
                account.lent.append((account.sent, lent_bytes))
                account.lent_bytes += lent_bytes

    @staticmethod
    def _look(account: Account, now: float) -> ConnectionState | None:
        """None if the connection has ended."""
        state = look_at(account.descriptor)
        if state is None or state.cookie != account.cookie:
            return None
        account.note(state, now)
        return state

    # ── memory ──

    def watch(self, *, is_empty: bool) -> float:
        """Cuts off whoever takes too much. `is_empty`: nothing waits to be received. Returns the seconds until it wants
        to be called again."""
        now = self._clock()
        has_grown, excess, again_s = self._memory.look(now)
        if excess > 0 or has_grown or len(self._accounts) > self._tidy_at:
            taken = self._look_at_all(now, is_empty=is_empty)
            if excess > 0:
                self._make_room(taken, excess, now, is_empty=is_empty)
        return again_s

    def _look_at_all(self, now: float, *, is_empty: bool) -> list[_Taken]:
        """Cuts off those that have too much unread. Returns the others."""
        states = {state.cookie: state for state in accepted_at(self._port)}
        for route, account in list(self._accounts.items()):
            if account.cookie not in states:
                if is_empty or (account.messages == account.messages_after_end and not account.is_cut_off):
                    del self._accounts[route]  # libzmq has nothing of it any more
                account.messages_after_end = account.messages
        self._by_cookie = {account.cookie: account for account in self._accounts.values()}
        self._tidy_at = max(FIRST_TIDY, 2 * len(self._accounts))
        taken: list[_Taken] = []
        for state in states.values():
            account = self._by_cookie.get(state.cookie) or Account(state.cookie, state.descriptor)
            account.note(state, now)
            unread = state.received - account.delivered
            if unread > max(UNREAD_LIMIT_BYTES, self._memory.limit_bytes // UNREAD_SHARE):
                self._cut_off(account, state, now, f"{unread >> 20} MiB of it are unread")
            elif not account.is_cut_off:
                taken.append(_Taken(unread + account.unsent_copies, state, account))
        return taken

    def _make_room(self, taken: list[_Taken], excess: int, now: float, *, is_empty: bool) -> None:
        """This process has too much memory: cuts off the peers that take most of it, if the peers do."""
        what = f"this process has {excess >> 20} MiB more than its memory_limit_bytes"
        found = self._largest(taken, excess, is_empty=is_empty) or self._largest_lent(taken, now)
        for nbytes, state, account in found:
            self._cut_off(account, state, now, f"{what}, and {(nbytes or account.lent_bytes) >> 20} MiB of it wait")
        if not found and now > self._log_at:
            self._log_at = now + LOG_INTERVAL_S
            logger.warning("%s: raise it, or add servers", what)

    def _largest(self, taken: list[_Taken], excess: int, *, is_empty: bool) -> list[_Taken]:
        """Those that have most waiting in copies, until that makes up for the excess. While messages of peers that were
        cut off are still being dropped, only those that have more than they may."""
        is_draining = not is_empty and any(account.is_cut_off for account in self._accounts.values())
        is_theirs = sum(entry.nbytes for entry in taken) * AMPLIFICATION > excess and not is_draining
        found: list[_Taken] = []
        for entry in sorted(taken, key=lambda entry: entry.nbytes, reverse=True):
            if excess > 0 and entry.nbytes > (NOTABLE_BYTES if is_theirs else LARGE_BYTES):
                found.append(entry)
                excess -= entry.nbytes
        return found

    def _largest_lent(self, taken: list[_Taken], now: float) -> list[_Taken]:
        """Who makes this process keep most versions, perhaps old ones: at most one a while, since it may have been
        waiting for versions that are current."""
        lent = [entry for entry in taken if entry.account.lent_bytes > LARGE_BYTES]
        if not lent or now < self._lent_at:
            return []
        self._lent_at = now + LENT_INTERVAL_S
        return [max(lent, key=lambda entry: (entry.account.is_stalled(now, 0.0), entry.account.lent_bytes))]

    def _cut_off(self, account: Account, state: ConnectionState, now: float, why: str) -> None:
        """Ends a connection. What it has sent is dropped, and its memory goes back to the system."""
        account.is_cut_off = True
        cut_off(state)
        self._memory.peer_was_cut_off(now)
        logger.warning("cut off a peer: %s", why)

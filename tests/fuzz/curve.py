"""CurveZMQ by hand, as <https://rfc.zeromq.org/spec/26/> has it: the client's side of a handshake, and sealed frames.

An attack can change each step, which libzmq's own client does not allow.
"""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

from nacl.bindings import crypto_box_afternm as seal
from nacl.bindings import crypto_box_beforenm, crypto_box_keypair, crypto_box_open_afternm
from nacl.exceptions import CryptoError
from zmq.utils import z85

from kvd.node.keys.keyfiles import NodeKey
from tests.fuzz.zmtp import COMMAND, MORE, TIMEOUT_S, Dealer, command, frame, greeting, metadata

WELCOME_NBYTES: Final = 168
OPENS_READY: Final = b"\x05READY"
SEALED_MORE, SEALED_COMMAND = 1, 2  # flags within a box


class CurveKeys(NamedTuple):
    """What a client needs for a handshake.

    Attributes:
        server: the public key of the other end.
    """

    public: bytes
    secret: bytes
    server: bytes


def keys_of(key: NodeKey) -> CurveKeys:
    """Those of a key file; the other end is the scheduler, or any daemon with the cluster's key."""
    return CurveKeys(z85.decode(key.keypair.public), z85.decode(key.keypair.secret), z85.decode(key.scheduler))


def strange_keys(server: bytes) -> CurveKeys:
    """A key that nobody has let in."""
    public, secret = crypto_box_keypair()
    return CurveKeys(public, secret, server)


class RefusedError(Exception):
    """The other end did not go on with the handshake."""


class CurveDealer(Dealer):
    """A connection to a daemon with keys, each frame in a box.

    Args:
        keys: who it is, and whom it speaks to.
        identity: the routing id that it asks for.
        properties: the metadata of its INITIATE, instead of the usual.

    Attributes:
        nonce: of the last box that it has sealed.
        initiate: what it said as INITIATE, without the head of the frame.

    Raises:
        RefusedError: the other end does not let it in.
    """

    def __init__(
        self,
        address: str,
        keys: CurveKeys,
        identity: bytes = b"",
        *,
        properties: bytes | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(address, timeout_s)
        self.nonce = 0
        self.initiate = b""
        self._public, self._secret = crypto_box_keypair()
        self._received = b""
        try:
            if properties is None:
                properties = metadata(Socket_Type=b"DEALER", Identity=identity)
            self._shake_hands(keys, properties, timeout_s)
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, keys: CurveKeys, properties: bytes, timeout_s: float) -> None:
        self.send(greeting(mechanism=b"CURVE"))
        self._take(64, timeout_s)
        known = crypto_box_beforenm(keys.server, self._secret)
        self.send(self._hello(known))
        welcome = self._read_frame(timeout_s)
        if len(welcome) != WELCOME_NBYTES:
            raise RefusedError(f"no WELCOME: {welcome[:40]!r}")
        opened = crypto_box_open_afternm(welcome[24:], b"WELCOME-" + welcome[8:24], known)
        server, cookie = opened[:32], opened[32:]
        self._shared = crypto_box_beforenm(server, self._secret)
        vouch_nonce = secrets.token_bytes(16)
        vouched = seal(self._public + keys.server, b"VOUCH---" + vouch_nonce, crypto_box_beforenm(server, keys.secret))
        box = self._box(keys.public + vouch_nonce + vouched + properties, b"CurveZMQINITIATE")
        self.initiate = b"\x08INITIATE" + cookie + box
        self.send(frame(self.initiate, COMMAND))
        ready = self._read_frame(timeout_s)
        if not ready.startswith(OPENS_READY):
            raise RefusedError(f"no READY: {ready[:40]!r}")
        self._open(ready[6:], b"CurveZMQREADY---")

    def _hello(self, known: bytes) -> bytes:
        self.nonce += 1
        nonce = self.nonce.to_bytes(8, "big")
        box = seal(bytes(64), b"CurveZMQHELLO---" + nonce, known)
        return command(b"HELLO", b"\1\0" + bytes(72) + self._public + nonce + box)

    # ── boxes ──

    def _box(self, content: bytes, prefix: bytes, nonce: int | None = None) -> bytes:
        """The short nonce, which is the next one unless it is given, and the box."""
        if nonce is None:
            self.nonce = nonce = self.nonce + 1
        short = nonce.to_bytes(8, "big")
        return short + seal(content, prefix + short, self._shared)

    def _open(self, box: bytes, prefix: bytes) -> bytes:
        try:
            return crypto_box_open_afternm(box[8:], prefix + box[:8], self._shared)
        except CryptoError:
            raise RefusedError("a box that does not open") from None

    def sealed(self, content: bytes, *, nonce: int | None = None) -> bytes:
        """What a MESSAGE is besides the head of its frame. `content`: one byte of flags, and the body."""
        return b"\x07MESSAGE" + self._box(content, b"CurveZMQMESSAGEC", nonce)

    def frame(self, body: bytes, flags: int = 0, *, declared: int | None = None) -> bytes:
        """A frame in a box of its own, to be sent once, in the order in which they were made."""
        inner = (SEALED_MORE if flags & MORE else 0) | (SEALED_COMMAND if flags & COMMAND else 0)
        return frame(self.sealed(bytes([inner]) + body), flags & ~(MORE | COMMAND), declared=declared)

    # ── hearing ──

    def hear(self, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """The next frame that the other end says: its flags within the box, and its body.

        Raises:
            RefusedError: it has hung up, or says something else.
        """
        said = self._read_frame(timeout_s)
        if not said.startswith(b"\x07MESSAGE"):
            raise RefusedError(f"no MESSAGE: {said[:40]!r}")
        opened = self._open(said[8:], b"CurveZMQMESSAGES")
        return opened[0], opened[1:]

    def hear_raw(self, timeout_s: float = TIMEOUT_S) -> bytes:
        """The next frame as it came, in its box."""
        return self._read_frame(timeout_s)

    def _read_frame(self, timeout_s: float) -> bytes:
        head = self._take(2, timeout_s)
        nbytes = head[1]
        if head[0] & 2:
            nbytes = int.from_bytes(head[1:] + self._take(7, timeout_s), "big")
        return self._take(nbytes, timeout_s)

    def _take(self, nbytes: int, timeout_s: float) -> bytes:
        while len(self._received) < nbytes:
            piece = self.read(timeout_s=timeout_s)
            if not piece:
                raise RefusedError("it has hung up")
            self._received += piece
        taken, self._received = self._received[:nbytes], self._received[nbytes:]
        return taken

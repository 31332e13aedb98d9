"""The records of a sealed link: bytes of one direction, encrypted and authenticated with AES-256-GCM.

Each direction of each connection has its own secret, so its own keys. Records are numbered from 0. The number is the
nonce, is never sent, and is never used twice: not under one key, nor under the next. A record opens only in its place,
unchanged, and on the side that it was meant for; one that does not ends the link.

Every `RECORDS_PER_KEY` records both sides go on to the next key, which HKDF derives from the secret of the one before.
So a key seals at most 2^15 records and 16 GiB. NIST SP 800-38D allows 2^32 records under a key with distinct nonces
(section 8.3) and 2^39 - 256 bits in one record (section 5.2.1.1). 16 GiB are 2^30 blocks: the chance to tell them from
noise stays below 2^-68 (RFC 8446, section 5.5, counts the same way and allows 2^-57).

`cryptography` does the work. It is imported when the first link is sealed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from struct import Struct
from typing import Final, NamedTuple, Protocol, TypeAlias

from kvd.errors import ConfigError

Buffer: TypeAlias = "bytes | bytearray | memoryview"

HEAD = Struct("<I")  # of a record: how many bytes are sealed in it
TAG_BYTES = 16
OVERHEAD_BYTES = HEAD.size + TAG_BYTES
RECORD_BYTES = 512 << 10  # most that is sealed in one record
RECORDS_PER_KEY = 1 << 15
MOST_RECORDS = 1 << 63  # in one direction of one connection
SECRET_BYTES = 32

OVER_TCP: Final = "no link over TCP: "
"""Begins the reason, among several, why there is no link between two hosts."""

_NONCE = Struct("<4xQ")
_PROTOCOL = b"kvd link 1 "
_USED_UP = "the numbers of the records are used up"


class BrokenSealError(Exception):
    """The other end's bytes are not the next record."""


class Cipher(Protocol):
    """One AES-GCM key."""

    def encrypt_into(self, nonce: Buffer, data: Buffer, associated_data: Buffer, buf: Buffer) -> int: ...

    def decrypt_into(self, nonce: Buffer, data: Buffer, associated_data: Buffer, buf: Buffer) -> int: ...


def why_not() -> str:
    """Why links cannot be sealed here, or an empty text."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return "the package cryptography cannot be imported"
    return "" if hasattr(AESGCM, "decrypt_into") else "the package cryptography is too old"


def reason_over_tcp(reason: str) -> str:
    """Return why two hosts have no sealed link, without the reasons why there is none within one host.

    Args:
        reason: all reasons, as a node says them.
    """
    return reason.rpartition(OVER_TCP)[2]


def remedy_for(reason: str) -> str:
    """Return what makes sealed links possible between two hosts.

    Args:
        reason: as `reason_over_tcp` returns it.
    """
    if "cryptography" in reason:
        return "Install it on all hosts with pip install 'cryptography>=47', and restart the job."
    if "turned off" in reason:
        return 'Set tcp_links = "auto" (KVD_TCP_LINKS) on all hosts, and restart the job.'
    return (
        "Open the ports of the servers' hosts to the other hosts of the job: a server listens for links at a port that "
        "the system chooses. Then restart the job."
    )


def _cipher(key: bytes) -> Cipher:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


# ── secrets ──


class LinkSecrets(NamedTuple):
    """What both ends of one link know, and nobody else. All have `SECRET_BYTES`.

    Attributes:
        client_proof, server_proof: what each end says to prove that it knows them.
        to_server, to_client: what the records of each direction are sealed with.
    """

    client_proof: bytes
    server_proof: bytes
    to_server: bytes
    to_client: bytes


def link_secrets(shared: bytes, transcript: bytes) -> LinkSecrets:
    """The secrets of a link, which are others for another transcript. HKDF-SHA256 (RFC 5869).

    Args:
        shared: the secret that both ends got over an encrypted connection, `SECRET_BYTES`.
        transcript: all that both ends have said about this link, with a challenge from each.
    """
    extracted = hmac.digest(hashlib.sha256(transcript).digest(), shared, "sha256")
    return LinkSecrets(*(_expand(extracted, label.encode()) for label in LinkSecrets._fields))


def _expand(secret: bytes, label: bytes) -> bytes:
    """HKDF-Expand to one block, which is `SECRET_BYTES`."""
    return hmac.digest(secret, _PROTOCOL + label + b"\1", "sha256")


# ── records ──


def _numbered_keys(secret: bytes, records_per_key: int, first: int) -> Callable[[], tuple[Cipher, bytes]]:
    """Return what gives the key and the nonce of the next record, and raises StopIteration after the last number.

    Whatever becomes of the record, no other one gets this nonce. Only a new key takes a step of the interpreter.

    Raises:
        ConfigError: `cryptography` is missing or too old.
    """
    problem = why_not()
    if problem:
        raise ConfigError(f"links between hosts cannot be sealed: {problem}. {remedy_for(problem)}")
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes: {SECRET_BYTES} are needed")
    return chain.from_iterable(_records_of_keys(secret, records_per_key, first)).__next__


def _records_of_keys(secret: bytes, records_per_key: int, first: int) -> Iterator[Iterator[tuple[Cipher, bytes]]]:
    """For one key after the other, the key and the nonce of each of its records."""
    while first < MOST_RECORDS:
        numbers = range(first, min(first + records_per_key, MOST_RECORDS))
        cipher, secret = _cipher(_expand(secret, b"key")), _expand(secret, b"next")
        yield zip(repeat(cipher), map(_NONCE.pack, numbers))
        first = numbers.stop


class Sealer:
    """The sending side of one direction. One thread at a time calls it.

    Args:
        secret: of the direction; the other end's `Opener` has the same.
        records_per_key: after how many records both sides change the key.
        first: the number of the first record.

    Raises:
        ConfigError: `cryptography` is missing or too old.
    """

    def __init__(self, secret: bytes, *, records_per_key: int = RECORDS_PER_KEY, first: int = 0) -> None:
        self._next = _numbered_keys(secret, records_per_key, first)

    def seal(self, plain: Buffer, record: memoryview) -> int:
        """Writes a record with 1 to `RECORD_BYTES` bytes, and returns its size, `OVERHEAD_BYTES` more.

        Raises:
            BrokenSealError: the numbers of the records are used up.
        """
        if not 0 < len(plain) <= RECORD_BYTES:
            raise ValueError(f"{len(plain)} bytes for one record: it takes 1 to {RECORD_BYTES}")
        end = len(plain) + OVERHEAD_BYTES
        try:
            cipher, nonce = self._next()
        except StopIteration:
            raise BrokenSealError(_USED_UP) from None
        head = HEAD.pack(len(plain))
        record[: HEAD.size] = head
        cipher.encrypt_into(nonce, plain, head, record[HEAD.size : end])
        return end


class Opener:
    """The receiving side of one direction. One thread at a time calls it. Arguments as for `Sealer`."""

    def __init__(self, secret: bytes, *, records_per_key: int = RECORDS_PER_KEY, first: int = 0) -> None:
        self._next = _numbered_keys(secret, records_per_key, first)
        from cryptography.exceptions import InvalidTag

        self._invalid_tag = InvalidTag

    @staticmethod
    def plain_nbytes(head: memoryview) -> int:
        """How many bytes are sealed in the record that begins so. Nothing proves this number yet, but it has a bound.

        Raises:
            BrokenSealError: no record begins so.
        """
        nbytes: int = HEAD.unpack_from(head)[0]
        if not 0 < nbytes <= RECORD_BYTES:
            raise BrokenSealError(f"a record of {nbytes} bytes: 1 to {RECORD_BYTES} are allowed")
        return nbytes

    def open(self, record: memoryview, plain: memoryview) -> None:
        """Opens the next record into memory of exactly its size, which holds nothing of use if this raises.

        Raises:
            BrokenSealError: it is not the next record of the other side, or was changed on the way.
        """
        try:
            cipher, nonce = self._next()
            cipher.decrypt_into(nonce, record[HEAD.size :], record[: HEAD.size], plain)
        except StopIteration:
            raise BrokenSealError(_USED_UP) from None
        except self._invalid_tag:
            raise BrokenSealError("a record was changed on the way, or is not the next one") from None

"""The records of sealed links, against `cryptography` called by hand, and what an attacker does to them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import ConfigError
from kvd.transport.links import sealing
from kvd.transport.links.sealing import (
    MOST_RECORDS,
    OVERHEAD_BYTES,
    RECORD_BYTES,
    RECORDS_PER_KEY,
    BrokenSealError,
    Opener,
    Sealer,
    link_secrets,
)

SECRET = bytes(range(32))


def sealed(sealer: Sealer, *texts: bytes) -> list[bytes]:
    records = []
    for text in texts:
        memory = memoryview(bytearray(len(text) + OVERHEAD_BYTES))
        assert sealer.seal(text, memory) == len(memory)
        records.append(bytes(memory))
    return records


def opened(opener: Opener, record: bytes) -> bytes:
    view = memoryview(record)
    plain = bytearray(opener.plain_nbytes(view[:4]))
    opener.open(view, memoryview(plain))
    return bytes(plain)


def expanded(secret: bytes, label: bytes) -> bytes:
    return HKDFExpand(SHA256(), 32, b"kvd link 1 " + label).derive(secret)


# ── the format, calculated independently ──


def test_a_record_is_its_size_then_aes_gcm_with_the_number_as_nonce_and_the_size_as_associated_data() -> None:
    key = AESGCM(expanded(SECRET, b"key"))
    texts = [b"first", b"x" * RECORD_BYTES, b"third"]
    for number, (text, record) in enumerate(zip(texts, sealed(Sealer(SECRET), *texts), strict=True)):
        head = len(text).to_bytes(4, "little")
        nonce = bytes(4) + number.to_bytes(8, "little")
        assert record == head + key.encrypt(nonce, text, head)


def test_the_next_key_comes_from_the_secret_of_the_one_before() -> None:
    records = sealed(Sealer(SECRET, records_per_key=3), *[b"text"] * 10)
    secret = SECRET
    for number, record in enumerate(records):
        if number and number % 3 == 0:
            secret = expanded(secret, b"next")
        nonce = bytes(4) + number.to_bytes(8, "little")
        assert AESGCM(expanded(secret, b"key")).decrypt(nonce, record[4:], record[:4]) == b"text"
    assert len({record[4:] for record in records}) == 10


def test_the_secrets_of_a_link_are_hkdf_of_the_shared_secret_and_the_transcript() -> None:
    digest = hashlib.sha256(b"all that was said").digest()
    secrets = link_secrets(SECRET, b"all that was said")
    for label in ("client_proof", "server_proof", "to_server", "to_client"):
        derived = HKDF(SHA256(), 32, digest, b"kvd link 1 " + label.encode()).derive(SECRET)
        assert getattr(secrets, label) == derived
    others = [*link_secrets(SECRET, b"something else"), *link_secrets(bytes(32), b"all that was said")]
    assert len({*secrets, *others}) == 12


def test_a_key_serves_few_records_and_bytes() -> None:
    assert RECORDS_PER_KEY <= 1 << 32  # NIST SP 800-38D, section 8.3
    assert RECORD_BYTES * 8 <= (1 << 39) - 256  # section 5.2.1.1
    assert RECORDS_PER_KEY * RECORD_BYTES <= 1 << 34  # 2^30 blocks
    assert MOST_RECORDS <= 1 << 64  # numbers that fit into the nonce


# ── use ──


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=20), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_what_was_sealed_opens_in_its_order_over_any_number_of_keys(texts: list[bytes], records_per_key: int) -> None:
    sealer = Sealer(SECRET, records_per_key=records_per_key)
    opener = Opener(SECRET, records_per_key=records_per_key)
    assert [opened(opener, record) for record in sealed(sealer, *texts)] == texts


def test_records_have_a_size() -> None:
    memory = memoryview(bytearray(RECORD_BYTES + 100))
    for nbytes in (0, RECORD_BYTES + 1):
        with pytest.raises(ValueError, match="one record"):
            Sealer(SECRET).seal(bytes(nbytes), memory)
        with pytest.raises(BrokenSealError, match="are allowed"):
            Opener.plain_nbytes(memoryview(nbytes.to_bytes(4, "little")))


def test_numbers_end_before_they_repeat() -> None:
    sealer, opener = Sealer(SECRET, first=MOST_RECORDS - 1), Opener(SECRET, first=MOST_RECORDS - 1)
    record = sealed(sealer, b"the last one")[0]
    assert opened(opener, record) == b"the last one"
    with pytest.raises(BrokenSealError, match="used up"):
        sealed(sealer, b"one more")
    with pytest.raises(BrokenSealError, match="used up"):
        opened(opener, record)


def test_a_number_is_spent_even_if_sealing_fails() -> None:
    sealer = Sealer(SECRET)
    with pytest.raises(ValueError, match="buffer"):
        sealer.seal(b"text", memoryview(bytearray(5)))
    opener = Opener(SECRET, first=1)
    assert opened(opener, sealed(sealer, b"text")[0]) == b"text"


# ── attacks ──


def test_every_bit_counts() -> None:
    record = sealed(Sealer(SECRET), b"a text of some length")[0]
    for bit in range(8 * len(record)):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((BrokenSealError, ValueError)):
            opened(Opener(SECRET), bytes(changed))


@given(st.binary(min_size=1, max_size=2000), st.data())
@settings(max_examples=200, deadline=None)
def test_changed_and_cut_records_do_not_open(text: bytes, data: st.DataObject) -> None:
    record = sealed(Sealer(SECRET), text)[0]
    at = data.draw(st.integers(4, len(record) - 1))
    changed = bytearray(record)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BrokenSealError):
        opened(Opener(SECRET), bytes(changed))
    cut = data.draw(st.integers(20, len(record)))
    if cut < len(record):
        plain = memoryview(bytearray(cut - 20))
        shorter = (cut - 20).to_bytes(4, "little") + record[4:cut]
        with pytest.raises(BrokenSealError):
            Opener(SECRET).open(memoryview(shorter), plain)


@given(st.permutations(range(5)))
@settings(max_examples=60, deadline=None)
def test_records_open_in_no_other_order(order: list[int]) -> None:
    texts = [b"%d" % number for number in range(5)]
    records = sealed(Sealer(SECRET, records_per_key=2), *texts)
    opener = Opener(SECRET, records_per_key=2)
    arrived: list[bytes] = []
    with suppress(BrokenSealError):
        arrived.extend(opened(opener, records[index]) for index in order)
    assert arrived == texts[: len(arrived)]
    assert (arrived == texts) == (order == sorted(order))


def replayed(records: list[bytes]) -> list[bytes]:
    return [records[0], records[0]]


def left_out(records: list[bytes]) -> list[bytes]:
    return [records[0], records[2]]


@pytest.mark.parametrize("attack", [replayed, left_out])
def test_a_record_opens_once_and_in_its_place(attack: Callable[[list[bytes]], list[bytes]]) -> None:
    first, second = attack(sealed(Sealer(SECRET), b"same", b"same", b"same"))
    opener = Opener(SECRET)
    assert opened(opener, first) == b"same"
    with pytest.raises(BrokenSealError):
        opened(opener, second)


def test_what_one_side_sealed_does_not_open_there() -> None:
    secrets = link_secrets(SECRET, b"said")
    record = sealed(Sealer(secrets.to_server), b"text")[0]
    assert opened(Opener(secrets.to_server), record) == b"text"
    with pytest.raises(BrokenSealError):
        opened(Opener(secrets.to_client), record)


def test_records_of_another_link_do_not_open() -> None:
    record = sealed(Sealer(link_secrets(SECRET, b"one").to_server), b"text")[0]
    with pytest.raises(BrokenSealError):
        opened(Opener(link_secrets(SECRET, b"other").to_server), record)


# ── without cryptography ──


def test_without_cryptography_there_is_a_reason_and_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sealing.why_not() == ""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    assert "cannot be imported" in sealing.why_not()
    with pytest.raises(ConfigError, match="cryptography cannot be imported"):
        Sealer(SECRET)


def test_an_old_cryptography_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", object)
    assert "too old" in sealing.why_not()

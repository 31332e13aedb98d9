"""``powersgd``: bytes worked out by hand, the paper's algorithm in float64, slices of a matrix, and bad input."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvd.compression import PowerSGD
from kvd.compute.codecs import RememberingCodec, ShapedCodec, codec_of, encode, encode_fed_back
from kvd.errors import ProtocolError

Floats = NDArray[np.float32]


def of_slice(compressor: PowerSGD, shape: tuple[int, ...], start: int, size: int) -> RememberingCodec:
    codec = codec_of(compressor)
    assert isinstance(codec, ShapedCodec)
    found = codec.of_slice(shape, start, size)
    assert found is not None
    return found


def sent(
    compressor: PowerSGD, values: Any, memory: Floats, residual: Floats | None = None, *, start: int = 0, nonce: int = 1
) -> tuple[bytes, Any]:
    """The bytes of a value, or of what lies in it from ``start`` on, and what the server makes of them."""
    size = values.size - start
    codec = of_slice(compressor, values.shape, start, size).remembering(memory)
    out, flat = np.empty(codec.max_nbytes(size), np.uint8), values.reshape(-1)[start:].astype(np.float32)
    nbytes = encode(codec, flat, out, nonce) if residual is None else encode_fed_back(codec, flat, residual, out, nonce)
    data, result = out[:nbytes].tobytes(), np.full(size, 77, np.float32)
    server = codec_of(compressor)
    server.check(np.frombuffer(data, np.uint8), size)
    server.decode(np.frombuffer(data, np.uint8), result)
    return data, result


def test_bytes_worked_out_by_hand() -> None:
    """M = (3, 4)ᵀ (1, 2). From Q = (1, 0): P = (3, 4) / 5, Q = Mᵀ P = (5, 10)."""
    memory = np.array([1, 0], np.float32)
    data, result = sent(PowerSGD(rank=1), np.array([[3, 6], [4, 8]]), memory)
    assert data == struct.pack("<2I4f", 2, 0, 0.6, 0.8, 5, 10)
    np.testing.assert_allclose(result, [3, 6, 4, 8], rtol=1e-6)
    np.testing.assert_allclose(memory, [1 / 5**0.5, 2 / 5**0.5], rtol=1e-6)  # from there the next push goes on


def test_a_slice_that_begins_within_a_row_by_hand() -> None:
    """The third of the elements on: what is missing of the row is 0, so M = (0, 4)ᵀ (1, 2), and the last element."""
    data, result = sent(PowerSGD(rank=1), np.array([[3, 6], [0, 4], [8, 0]]), np.array([0, 1], np.float32), start=3)
    assert data == struct.pack("<2I4f", 2, 1, 1, 0, 0, 4)
    assert result.tolist() == [4, 0, 0]


def by_the_paper(matrix: Any, q: Any) -> tuple[Any, Any]:
    """One step in float64: what is sent, and the Q that the next one begins with."""
    p, _ = np.linalg.qr(matrix @ q)
    q = matrix.T @ p
    return p @ q.T, q


def projector(q: Any) -> Any:
    """On the space of the columns, which is all that matters of Q."""
    basis, _ = np.linalg.qr(q.astype(float))
    return basis @ basis.T


def low_rank(random: np.random.Generator, rows: int, columns: int) -> Any:
    """A matrix with some large directions, and some noise."""
    weights = np.array([8, 4, 2, 1, 0.5, 0.25])
    matrix = (random.normal(size=(rows, 6)) * weights) @ random.normal(size=(6, columns))
    return (matrix + 0.01 * random.normal(size=(rows, columns))).astype(np.float32)


@pytest.mark.parametrize("shape", [(40, 30), (7, 3, 5, 2), (3, 100), (500, 2)])
def test_error_feedback_over_100_rounds(shape: tuple[int, ...]) -> None:
    """Each against the paper's algorithm in float64, from what the round before has left; and nothing is lost. (Over
    many rounds any two calculations part: what is left over has several directions of nearly the same length.)"""
    random, rows = np.random.default_rng(3), shape[0]
    columns = int(np.prod(shape[1:]))
    rank = min(2, columns)
    memory, residual = random.normal(size=rank * columns).astype(np.float32), np.zeros(rows * columns, np.float32)
    missing = np.zeros(rows * columns)
    for _ in range(100):
        gradient = low_rank(random, rows, columns)
        total = gradient + residual.reshape(rows, columns).astype(float)
        expected, q = by_the_paper(total, memory.reshape(rank, columns).T.astype(float))
        _, result = sent(PowerSGD(rank=rank), gradient.reshape(shape), memory, residual)
        scale = np.abs(total).max()
        np.testing.assert_allclose(result.reshape(rows, columns), expected, atol=1e-4 * scale)
        np.testing.assert_allclose(residual.reshape(rows, columns), total - expected, atol=1e-4 * scale)
        np.testing.assert_allclose(projector(memory.reshape(rank, columns).T), projector(q), atol=1e-3)
        missing += gradient.reshape(-1).astype(float) - result
    np.testing.assert_allclose(residual, missing, atol=1e-3 * scale)


def test_pushes_of_one_matrix_approach_its_best_approximation() -> None:
    """The warm start makes the pushes a power method."""
    matrix = low_rank(np.random.default_rng(5), 60, 50)
    best = float(np.linalg.norm(np.linalg.svd(matrix.astype(float), compute_uv=False)[3:]))
    memory = np.zeros(150, np.float32)
    errors = [float(np.linalg.norm(sent(PowerSGD(rank=3), matrix, memory)[1] - matrix.reshape(-1))) for _ in range(12)]
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.001 * best


def test_the_bytes_follow_from_the_seed_and_the_push() -> None:
    matrix = np.random.default_rng(6).normal(size=(20, 30))
    first, again, another = (
        sent(PowerSGD(seed=seed), matrix, np.zeros(120, np.float32), nonce=nonce)[0]
        for seed, nonce in ((1, 1), (1, 1), (2, 1))
    )
    assert first == again != another
    assert first != sent(PowerSGD(seed=1), matrix, np.zeros(120, np.float32), nonce=2)[0]


@pytest.mark.parametrize("cut", [1, 29, 30, 31, 600, 1234])
def test_slices_of_a_matrix_are_matrices(cut: int) -> None:
    """A matrix of rank 3 is exact in slices that begin and end anywhere: its cut rows add one direction each."""
    random = np.random.default_rng(7)
    matrix = (random.normal(size=(50, 3)) @ random.normal(size=(3, 30))).astype(np.float32)
    _, result = sent(PowerSGD(rank=5), matrix, np.zeros(5 * 30, np.float32), start=cut)
    np.testing.assert_allclose(result, matrix.reshape(-1)[cut:], atol=1e-4)


def test_values_of_low_rank_and_zeros() -> None:
    memory = np.zeros(4 * 30, np.float32)
    assert (sent(PowerSGD(), np.zeros((20, 30)), memory)[1] == 0).all()
    assert (memory == 0).all()
    matrix = np.outer(np.arange(20), np.arange(30))
    for _ in range(3):  # three directions of four are empty, and are drawn again
        np.testing.assert_allclose(sent(PowerSGD(), matrix, memory)[1], matrix.reshape(-1), atol=1e-3)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1e20, 3.4e38])
def test_very_large_and_very_small_values_stay_finite(size: float) -> None:
    matrix = (np.sign(low_rank(np.random.default_rng(8), 40, 30)) * size).astype(np.float32)
    residual = np.zeros(1200, np.float32)
    memory = np.zeros(120, np.float32)
    for _ in range(3):
        _, result = sent(PowerSGD(), matrix, memory, residual)
        assert np.isfinite(result).all()
        assert np.isfinite(residual).all()
        assert np.isfinite(memory).all()


def test_what_is_not_finite_is_sent_as_nothing() -> None:
    matrix = low_rank(np.random.default_rng(9), 40, 30)
    without = matrix.copy()
    without[3, 4] = without[5, 6] = without[5, 7] = 0
    matrix[3, 4], matrix[5, 6], matrix[5, 7] = np.nan, np.inf, -np.inf
    residual = np.zeros(1200, np.float32)
    data, result = sent(PowerSGD(), matrix, np.zeros(120, np.float32), residual)
    assert data == sent(PowerSGD(), without, np.zeros(120, np.float32))[0]
    assert np.isfinite(result).all()
    assert (residual.reshape(40, 30)[[3, 5, 5], [4, 6, 7]] == 0).all()
    assert np.isfinite(residual).all()


def test_values_of_one_dimension_have_no_columns() -> None:
    codec = codec_of(PowerSGD())
    assert isinstance(codec, ShapedCodec)
    assert codec.of_slice((100,), 0, 100) is None
    assert codec.of_slice((), 0, 1) is None


@pytest.mark.parametrize(
    ("head", "nbytes", "text"),
    [
        (b"", 0, "a matrix has a head of 8 bytes, not 0 bytes"),
        (struct.pack("<2I", 0, 0), 8, "a slice begins within a row: not at 0 of 0"),
        (struct.pack("<2I", 5, 5), 8, "a slice begins within a row: not at 5 of 5"),
        (struct.pack("<2I", 5, 0), 56, "20 elements in rows of 5 have 80 bytes with rank 2, not 56"),
        (struct.pack("<2I", 2**32 - 1, 0), 88, "20 elements in rows of 4294967295 have 17179869192 bytes with rank 1"),
    ],
)
def test_bytes_of_a_peer_are_checked(head: bytes, nbytes: int, text: str) -> None:
    data = np.frombuffer(head.ljust(nbytes, b"\0"), np.uint8)
    with pytest.raises(ProtocolError, match=text):
        codec_of(PowerSGD(rank=2)).check(data, 20)

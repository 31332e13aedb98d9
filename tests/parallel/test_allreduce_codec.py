"""The codecs of AllReduceParameter. Expected values were worked out by hand from the bits of float32."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.errors import ConfigError, ShapeMismatch
from kvd.parallel.allreduce.codec import Bytes, Codec, Floats, codec_named, fold


def compressed(codec: Codec, values: Floats) -> Bytes:
    out = np.empty(values.size * codec.itemsize, np.uint8)
    codec.compress(values, out)
    return out


def decompressed(codec: Codec, data: Bytes) -> Floats:
    out = np.empty(data.size // codec.itemsize, np.float32)
    codec.decompress(data, out)
    return out


def from_bits(*bits: int) -> Floats:
    return np.array(bits, np.uint32).view(np.float32)


def bits_of(values: Floats) -> list[int]:
    return [int(bits) for bits in values.view(np.uint32)]


def test_golden_values() -> None:
    codec = codec_named("fp16")
    given = np.array([1.111111, 2.111111, 3.111111, 4.111111, 5.111111], np.float32)
    assert decompressed(codec, compressed(codec, given)).tolist() == [1.109375, 2.109375, 3.109375, 4.09375, 5.09375]


def test_the_most_significant_byte_goes_first() -> None:
    assert compressed(codec_named("fp16"), from_bits(0x12345678, 0xC0400000)).tolist() == [0x12, 0x34, 0xC0, 0x40]


def test_none_is_float32_least_significant_byte_first() -> None:
    codec = codec_named("none")
    data = compressed(codec, from_bits(0x12345678))
    assert data.tolist() == [0x78, 0x56, 0x34, 0x12]
    assert bits_of(decompressed(codec, data)) == [0x12345678]


def test_rounding_is_towards_zero_for_both_signs() -> None:
    codec = codec_named("fp16")
    assert bits_of(decompressed(codec, compressed(codec, from_bits(0x3F80FFFF, 0xBF80FFFF)))) == [
        0x3F800000,
        0xBF800000,
    ]


@pytest.mark.parametrize("bits", [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x00010000, 0x7F7F0000])
def test_zeros_infinities_and_extremes_stay(bits: int) -> None:
    codec = codec_named("fp16")
    assert bits_of(decompressed(codec, compressed(codec, from_bits(bits)))) == [bits]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (0x7F800001, 0x7FC00000),  # in the original: an infinity
        (0xFF80FFFF, 0xFFC00000),
        (0x7FC00000, 0x7FC00000),
        (0x7FA12345, 0x7FA10000),  # its upper bits are enough of a NaN
    ],
)
def test_a_nan_stays_a_nan(given: int, kept: int) -> None:
    codec = codec_named("fp16")
    values = from_bits(given, 0x3F800000)
    assert bits_of(decompressed(codec, compressed(codec, values))) == [kept, 0x3F800000]
    codec.round(values)
    assert bits_of(values) == [kept, 0x3F800000]


def test_round_is_compress_and_decompress() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for codec in (codec_named("fp16"), codec_named("none")):
        rounded = values.copy()
        codec.round(rounded)
        np.testing.assert_array_equal(rounded, decompressed(codec, compressed(codec, values)))


@pytest.mark.parametrize(("truncating", "total"), [(True, 256.0), (False, 1000.0)])
def test_a_thousand_ones(truncating: bool, total: float) -> None:
    codec = codec_named("fp16")
    one = compressed(codec, np.ones(2, np.float32))
    out = np.empty(2, np.float32)
    fold(codec, [one] * 1000, out, truncating=truncating)
    assert out.tolist() == [total, total]
    assert decompressed(codec, one).tolist() == [1.0, 1.0]  # the blocks are only read


def test_the_fold_goes_from_left_to_right() -> None:
    """256 + 1 is cut back to 256, 1 + 1 + 256 is cut to 258."""
    codec = codec_named("fp16")
    one, many = (compressed(codec, np.array([value], np.float32)) for value in (1.0, 256.0))
    out = np.empty(1, np.float32)
    fold(codec, [many, one, one], out, truncating=True)
    assert out[0] == 256.0
    fold(codec, [one, one, many], out, truncating=True)
    assert out[0] == 258.0


def test_overflow_and_nan_while_folding() -> None:
    codec = codec_named("fp16")
    blocks = [compressed(codec, np.array([3e38, np.inf, np.nan], np.float32))] * 2
    blocks.append(compressed(codec, np.array([0.0, -np.inf, 1.0], np.float32)))
    out = np.empty(3, np.float32)
    fold(codec, blocks, out, truncating=True)
    assert np.isposinf(out[0])
    assert np.isnan(out[1:]).all()


def test_empty_vectors() -> None:
    for codec in (codec_named("fp16"), codec_named("none")):
        nothing = compressed(codec, np.empty(0, np.float32))
        out = np.empty(0, np.float32)
        fold(codec, [nothing, nothing], out, truncating=True)
        assert nothing.size == out.size == 0


def test_misuse() -> None:
    with pytest.raises(ConfigError, match="'fp16' or 'none'"):
        codec_named("fp8")
    for codec in (codec_named("fp16"), codec_named("none")):
        with pytest.raises(ShapeMismatch, match="3 values take"):
            codec.compress(np.ones(3, np.float32), np.empty(5, np.uint8))
        with pytest.raises(ShapeMismatch, match="3 values take"):
            codec.decompress(np.empty(5, np.uint8), np.ones(3, np.float32))

"""Values that travel as a compressor made them, for workloads."""

from __future__ import annotations

import numpy as np

from kvd.compression import Compressor, to_wire
from kvd.compute.codecs import codec_of
from kvd.core.requests import Encoded, Item
from kvd.protocol.messages import MergedForm
from kvd.protocol.specs import padded
from tests.simulator.workloads.steps import Floats, item


def encoded(
    key: str,
    values: Floats,
    compressor: Compressor,
    merged: MergedForm = MergedForm.PLAIN,
    target: Floats | None = None,
    nonce: int = 0,
) -> Item:
    """An item whose source is this value, slice by slice, without what earlier pushes have left over."""
    plain, codec = item(key, values, target), codec_of(compressor)
    spec = plain.spec
    assert spec is not None
    ranges, pieces = [], bytearray()
    for index in range(spec.num_slices):
        start, size = (number // 4 for number in spec.span(index))
        out = np.empty(codec.max_nbytes(size), np.uint8)
        nbytes = codec.encode(values[start : start + size], out, nonce)
        pieces.extend(bytes(padded(len(pieces)) - len(pieces)))
        ranges.append((len(pieces), nbytes))
        pieces.extend(out[:nbytes].tobytes())
    source = np.frombuffer(pieces, np.uint8)
    return plain._replace(source=source, encoded=Encoded(to_wire(compressor), tuple(ranges), merged))

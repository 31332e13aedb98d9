"""Pushed values of another dtype than their key, converted when they arrive: the machine sees the key's dtype."""

from __future__ import annotations

import numpy as np

from kvd.compute.quiet import quietly
from kvd.compute.tensors import named_dtype
from kvd.protocol.messages import Cast, Message, Push
from kvd.protocol.specs import DTYPES
from kvd.transport.base import MAX_PAYLOAD_BYTES


def arrived(message: Message, payload: memoryview | None) -> memoryview | None:
    """The payload as the message wants it to be. One that cannot be converted stays as it is: the machine refuses a
    push of a wrong size."""
    if type(message) is not Push or message.cast is None or not payload:
        return payload
    return _converted(payload, message.cast) if _is_possible(payload.nbytes, message.cast) else payload


def _is_possible(nbytes: int, cast: Cast) -> bool:
    given, wanted = DTYPES.get(cast.given), DTYPES.get(cast.wanted)
    if given is None or wanted is None or not (given.is_float and wanted.is_float) or nbytes % given.itemsize:
        return False
    return nbytes // given.itemsize * wanted.itemsize <= MAX_PAYLOAD_BYTES


def _converted(payload: memoryview, cast: Cast) -> memoryview:
    values = np.frombuffer(payload, named_dtype(cast.given))
    return quietly(values.astype, named_dtype(cast.wanted)).view(np.uint8).data

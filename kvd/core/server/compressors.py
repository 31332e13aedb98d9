"""Which compressors this server knows."""

from __future__ import annotations

from kvd.compression import from_wire
from kvd.errors import ProtocolError
from kvd.protocol.messages import MAX_TEXT_CHARS, CompressorQuery, Done, ErrorCode, Refused


def compressor_answer(query: CompressorQuery, server: str) -> Done | Refused:
    """Done if the server of this name can decode what the compressor makes."""
    try:
        from_wire(query.compressor)
    except ProtocolError as error:
        text = f"{server}: {error}: install the same compressors on every node"
        return Refused(query.request, ErrorCode.NOT_ALLOWED, text[:MAX_TEXT_CHARS])
    return Done(query.request)

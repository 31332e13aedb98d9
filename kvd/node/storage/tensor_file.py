"""The content of safetensors files that kvd wrote, with their metadata. Nothing in them is executed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def parse_tensors(data: bytes, expected_format: str) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """The arrays by name, and the metadata, in which ``format`` is the expected one.

    Raises:
        ValueError: it is something else; the text says what is wrong.
    """
    from safetensors import SafetensorError  # most programs read no such file: they need not wait for the import
    from safetensors.numpy import load

    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    if metadata.get("format") != expected_format:
        raise ValueError(f"its metadata does not have the format {expected_format}")
    return tensors, metadata

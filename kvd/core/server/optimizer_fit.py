"""Which keys an optimizer can update: some need all elements of a key on one server, some update no single rows."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer
from kvd.optimizer.registry import row_error
from kvd.protocol.specs import DTYPES, MAX_SLICE_BYTES, KeySpec


def unfit_error(optimizer: Optimizer | None, key: str, spec: KeySpec) -> str:
    """Why the optimizer cannot update a key, in the user's words; empty if it can."""
    if optimizer is None:
        return ""
    return row_error(optimizer, key) if spec.table else _whole_key_error(optimizer, key, spec)


def _whole_key_error(optimizer: Optimizer, key: str, spec: KeySpec) -> str:
    if not optimizer.needs_whole_keys or spec.num_slices == 1 or not DTYPES[spec.dtype].is_float:
        return ""
    needed = -(-spec.nbytes // 64) * 64
    advice = (
        f"give the scheduler slice_bytes={needed} or more, as with kvd launch --slice-bytes {needed}"
        if needed <= MAX_SLICE_BYTES
        else f"slice_bytes is {MAX_SLICE_BYTES} at the most, so make several keys of it, or use another optimizer"
    )
    return (
        f"{type(optimizer).__name__} takes the norm of a whole value, but key {key!r} of {spec.nbytes} bytes has "
        f"{spec.num_slices} slices: {advice}"
    )


def check_fit(optimizer: Optimizer | None, keys: Iterable[tuple[str, KeySpec]]) -> None:
    """Raises NotAllowed if the optimizer cannot update one of the keys."""
    if optimizer is None:
        return
    for key, spec in keys:
        text = unfit_error(optimizer, key, spec)
        if text:
            raise NotAllowed(text, key=key)

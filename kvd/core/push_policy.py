"""What a push may be: one policy for the servers of a cluster and for the store without one."""

from __future__ import annotations

from kvd.protocol.messages import ADD
from kvd.protocol.specs import DTYPES


def push_error(key: str, dtype: str, how: int, *, has_optimizer: bool, merge: str, mixes: bool = False) -> str | None:
    """Why a push to a key is refused, as the text of a NotAllowed error; None if it may be taken.

    Args:
        key: the key's name, for the text.
        dtype: the dtype of its value, a name in `DTYPES`.
        how: ADD for a contribution to be merged, ASSIGN or ABSENT for the two halves of a broadcast.
        has_optimizer: whether an optimizer updates the value.
        merge: "sum", "mean" or "weighted"; "" where there are no rounds.
        mixes: whether the round has a push of the other kind: a contribution if this is a broadcast, or the reverse.
    """
    if mixes:
        return f"key {key!r} is broadcast and pushed in the same round: all workers must do the same"
    if how != ADD or DTYPES[dtype].is_float:
        return None
    if has_optimizer:
        return f"key {key!r} is {dtype}: optimizers update float keys only"
    if merge == "weighted":
        return f"key {key!r} is {dtype}: a weighted merge takes float keys only"
    return None

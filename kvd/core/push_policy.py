"""What a push may be: one policy for the servers of a cluster and for the store without one."""

from __future__ import annotations

from kvd.protocol.messages import ADD
from kvd.protocol.specs import DTYPES, merge_error


def push_error(
    key: str, dtype: str, how: int, *, has_optimizer: bool, merge: str, own_merge: str = "", mixes: bool = False
) -> str | None:
    """Why a push to a key is refused, as the text of a NotAllowed error; None if it may be taken.

    Args:
        key: the key's name, for the text.
        dtype: the dtype of its value, a name in `DTYPES`.
        how: ADD for a contribution to be merged, ASSIGN or ABSENT for the two halves of a broadcast.
        has_optimizer: whether an optimizer is set.
        merge: that of the cluster: "sum", "mean" or "weighted"; "" where there are no rounds.
        own_merge: that of the key; "": it was made without one.
        mixes: whether the round has a push of the other kind: a contribution if this is a broadcast, or the reverse.
    """
    if mixes:
        return f"key {key!r} is broadcast and pushed in the same round: all workers must do the same"
    if how != ADD or DTYPES[dtype].is_float:
        return None
    if has_optimizer and not own_merge:
        return (
            f"key {key!r} is {dtype}: optimizers update float keys only; to have it merged without the optimizer, make "
            f"it with a merge of its own, such as merge='sum'"
        )
    return merge_error(key, dtype, own_merge or merge)


def is_updated(dtype: str) -> bool:
    """Whether an optimizer that is set updates keys of this dtype; of others the merged value is the new one."""
    return DTYPES[dtype].is_float

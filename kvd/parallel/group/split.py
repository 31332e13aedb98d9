"""Which samples of a batch go to which device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

from kvd.errors import ConfigError, InputMismatch
from kvd.parallel.batch import DataDesc

#: ``"even"``: largest remainder. ``"mxnet"``: MXNet's rounding, and its errors.
SplitRule: TypeAlias = Literal["even", "mxnet"]


def split_batch_axis(batch_size: int, workload: Sequence[float], rule: SplitRule = "even") -> list[slice]:
    """One slice of the batch per device, in order, together the whole batch.

    Arguments:
        workload: a positive weight per device.
        rule: ``"even"`` gives each device ⌊wᵢ·B/Σw⌋ samples and one more to those with the largest remainders (of
            equal ones, the first), computed exactly. ``"mxnet"`` gives round(wᵢ·B/Σw), halves to even; the last
            device gets what is missing, and an excess is cut off the end (``_split_input_slice`` of MXNet 1.9.1).

    Raises:
        InputMismatch: a device would get nothing. Under ``"mxnet"`` that happens for some batches *larger* than the
            number of devices, such as 8 samples on 5 devices.
        ConfigError: an unknown rule, or a workload that is not positive.
    """
    if rule not in get_args(SplitRule):
        raise ConfigError(f'split={rule!r} is neither "even" nor "mxnet"', setting="split")
    if not workload or not all(math.isfinite(weight) and weight > 0 for weight in workload):
        raise ConfigError(
            f"workload must be positive numbers, one per device, not {list(workload)}", setting="workload"
        )
    counts = _even(batch_size, workload) if rule == "even" else _mxnet(batch_size, workload)
    slices, end = [], 0
    for count in counts:
        begin, end = end, min(end + count, batch_size)
        slices.append(slice(begin, end))
    empty = [index for index, part in enumerate(slices) if part.start >= part.stop]
    if empty:
        raise InputMismatch(
            f"Too many slices. Some splits are empty: {batch_size} samples over workload {list(workload)} "
            f'leave nothing for device {", ".join(map(str, empty))} (split="{rule}"): '
            "use fewer devices or a larger batch",
            setting="devices",
        )
    return slices


def common_batch_size(descs: Sequence[DataDesc]) -> int:
    """The batch size on which all descriptions with a batch axis agree.

    Raises:
        InputMismatch: they disagree, or none has a batch axis, so that there is nothing to split.
    """
    sizes = {desc.name: desc.batch_size for desc in descs if desc.batch_size is not None}
    if not sizes:
        names = ", ".join(desc.name for desc in descs) or "no arrays"
        raise InputMismatch(f"nothing to split: no batch axis N in the layout of {names}", setting="data_shapes")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise InputMismatch(f"the descriptions disagree on the batch: {listed}", setting="data_shapes")
    return next(iter(sizes.values()))


def _even(batch_size: int, workload: Sequence[float]) -> list[int]:
    weights = [Fraction(weight) for weight in workload]
    shares = [weight * batch_size / sum(weights) for weight in weights]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for index in by_remainder[: batch_size - sum(counts)]:
        counts[index] += 1
    return counts


def _mxnet(batch_size: int, workload: Sequence[float]) -> list[int]:
    total = sum(workload)
    counts = [round(weight * batch_size / total) for weight in workload]
    counts[-1] += max(batch_size - sum(counts), 0)
    return counts

"""The loss of a `TorchModel`: how the losses of the devices add up to that of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from kvd.errors import ConfigError

#: ``loss(outputs, labels)``: outputs as the module returned them; the label, or a list of them if there are several.
LossFunction: TypeAlias = Callable[[Any, Any], torch.Tensor]
#: What a loss of one number is of the losses of its samples.
LossReduction: TypeAlias = Literal["mean", "sum"]

#: The ``reduction`` of torch's losses that return one number. "batchmean" is that of ``KLDivLoss``.
_OF_TORCH: dict[str, LossReduction] = {"mean": "mean", "batchmean": "mean", "sum": "sum"}


@dataclass(frozen=True)
class BatchLoss:
    """A loss and its reduction; `of` checks the two.

    Attributes:
        function: of one device's outputs and labels.
        reduction: None: a plain callable that does not say.
    """

    function: LossFunction
    reduction: LossReduction | None

    @classmethod
    def of(cls, function: LossFunction, stated: LossReduction | None) -> BatchLoss:
        """The loss with the reduction that the program stated, or else with that of ``function.reduction``.

        Raises:
            ConfigError: ``stated`` is not a reduction, or the function's own is the other one.
        """
        if stated is not None and stated not in get_args(LossReduction):
            raise ConfigError(f'loss_reduction is {stated!r}, not "mean" or "sum"', setting="loss_reduction")
        name = getattr(function, "reduction", None)
        own = _OF_TORCH.get(name) if isinstance(name, str) else None
        if own is not None and stated not in (None, own):
            raise ConfigError(
                f'loss_reduction is "{stated}", but the loss has reduction "{name}": leave loss_reduction out, '
                "or change the loss",
                setting="loss_reduction",
            )
        return cls(function, stated or own)

    def part(self, outputs: Any, labels: list[torch.Tensor], samples: int, batch_samples: int) -> torch.Tensor:
        """One number: this device's part of the loss of the batch. The parts of all devices add up to that loss.

        Arguments:
            outputs: as the module returned them for this device's samples.
            samples: of this device.
            batch_samples: of the whole batch.

        Raises:
            ConfigError: the loss is neither one number nor one per sample, or it is one number for a part of the batch
                and its reduction is unknown.
        """
        loss = self.function(outputs, labels[0] if len(labels) == 1 else labels)
        if not isinstance(loss, torch.Tensor) or tuple(loss.shape) not in ((), (samples,)):
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"the loss gave {shape}: it has to be one number, or one per sample", setting="loss")
        if loss.ndim:
            total = loss.sum()
            return total if self.reduction == "sum" else total / batch_samples
        if self.reduction == "sum":
            return loss
        if self.reduction is None and samples == batch_samples:
            return loss
        if self.reduction is None and samples > 0:
            raise ConfigError(
                f"the loss is one number for {samples} of the batch's {batch_samples} samples, and nothing says "
                'whether it is their mean or their sum: give TorchModel loss_reduction="mean" or "sum"',
                setting="loss_reduction",
            )
        return loss * (samples / batch_samples)

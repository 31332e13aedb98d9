"""Any pure function of JAX as a model that a group can bind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device, HostArray, Shape
from kvd.parallel.models.jax.passes import JaxExecutor, named_outputs
from kvd.parallel.models.model import GradReq, ModelDescription

#: ``loss(outputs, labels)``: outputs as ``apply`` returned them; the label, or a list of them if there are several.
LossFunction = Callable[[Any, Any], Any]


class JaxModel:
    """``apply(params, *inputs)`` and its parameters, and optionally a loss.

    - ``params`` is a pytree of arrays. Its leaves are called after their place, joined by dots (``"dense.weight"``,
      ``"0.bias"``), in the order of `jax.tree_util`; a leaf alone is ``"params"``.
    - The data arrays are the inputs, in the order of their descriptions; no axis is moved. ``apply`` returns an array,
      or a tuple, list or dict of arrays, called as those of a `kvd.parallel.TorchModel`. It has to be pure: what is
      like a running mean or a dropout key goes in as data.
    - The loss has to be a mean over the samples (or one value per sample); each device's is scaled by samples of the
      device / samples of the batch.
    - Both are compiled (``jax.jit``) for each shape of the inputs. A forward for training computes outputs and
      gradients at once where there is a loss, and keeps them for backward, which announces the last parameter first.

    Arguments:
        apply: see above; the same in training and evaluation.
        params: the values to start with. They are copied.
        loss: see `LossFunction`; without it, backward takes head gradients.

    Raises:
        ConfigError: ``params`` holds something that is no array, or nothing.
    """

    def __init__(self, apply: Callable[..., Any], params: Any, loss: LossFunction | None = None) -> None:
        leaves, self.tree = jax.tree_util.tree_flatten_with_path(params)
        self.apply = apply
        self.loss = loss
        self._values: dict[str, HostArray] = {}
        for path, leaf in leaves:
            name = ".".join(_part(entry) for entry in path) or "params"
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ConfigError(f"params: {name} is a {type(leaf).__name__}, no array", setting="params")
            self._values[name] = np.array(leaf)
        if len(self._values) != len(leaves) or not leaves:
            raise ConfigError("params: no arrays, or two of one name", setting="params")
        self._described: dict[tuple[DataDesc, ...], tuple[DataDesc, ...]] = {}
        self._lock = threading.Lock()

    def initial(self) -> dict[str, HostArray]:
        """Copies of the parameters that were given, by name."""
        return {name: value.copy() for name, value in self._values.items()}

    def describe(self, data: Sequence[DataDesc], labels: Sequence[DataDesc] = ()) -> ModelDescription:
        """See `kvd.parallel.Model.describe`. ``apply`` is traced for it, not computed.

        Raises:
            ConfigError: ``apply`` cannot take such data; labels without a loss; an output without one axis that counts
                the samples.
        """
        if labels and self.loss is None:
            raise ConfigError("labels are described, but the model has no loss", setting="label_shapes")
        with self._lock:
            key = tuple(data)
            if key not in self._described:
                self._described[key] = self._outputs(data)
        shapes: dict[str, Shape] = {name: value.shape for name, value in self._values.items()}
        return ModelDescription(shapes, {}, self._described[key], has_loss=self.loss is not None)

    def bind(
        self,
        device: Device | str,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc] = (),
        *,
        for_training: bool = True,
        grad_req: GradReq | Mapping[str, GradReq] = "write",
        params: Mapping[str, Array] | None = None,
        grads: Mapping[str, Array] | None = None,
        aux: Mapping[str, Array] | None = None,
        normalization: int | None = None,
        seed: int | tuple[int, ...] = 0,
    ) -> JaxExecutor:
        """See `kvd.parallel.Model.bind`. What is not given starts with the values given to the constructor."""
        if aux:
            raise ConfigError(f"aux has {', '.join(aux)}: a pure function has no states", setting="aux")
        return JaxExecutor(
            self,
            Device.parse(device),
            data,
            labels,
            for_training=for_training,
            grad_req=grad_req,
            params=params or {},
            grads=grads or {},
            normalization=normalization,
        )

    def _outputs(self, data: Sequence[DataDesc]) -> tuple[DataDesc, ...]:
        sizes = {desc.batch_size for desc in data if desc.batch_size is not None}
        size = next(iter(sizes), 1) or 1
        here = self._shapes(data, size)
        more = self._shapes(data, size + 1) if sizes else here
        descs = []
        for (name, output), (_, larger) in zip(here.items(), more.items(), strict=True):
            changed = [axis for axis, (a, b) in enumerate(zip(output.shape, larger.shape, strict=True)) if a != b]
            if len(changed) > 1 or any(output.shape[i] != size or larger.shape[i] != size + 1 for i in changed):
                raise ConfigError(
                    f"{name} has shape {output.shape} for {size} samples and {larger.shape} for {size + 1}: "
                    "one axis of an output has to count the samples",
                    setting="apply",
                )
            layout = "".join("N" if axis in changed else "." for axis in range(len(output.shape)))
            descs.append(DataDesc(name, tuple(output.shape), np.dtype(output.dtype).name, layout))
        return tuple(descs)

    def _shapes(self, data: Sequence[DataDesc], size: int) -> dict[str, Any]:
        descs = [desc.with_batch_size(size) for desc in data]
        inputs = [jax.ShapeDtypeStruct(desc.shape, np.dtype(desc.dtype)) for desc in descs]
        params = self.tree.unflatten([jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self._values.values()])
        try:
            return named_outputs(jax.eval_shape(self.apply, params, *inputs))
        except ConfigError:
            raise
        except Exception as error:  # whatever the user's function raises: it says what it cannot take
            given = ", ".join(f"{desc.name} {desc.shape} {desc.dtype}" for desc in descs)
            raise ConfigError(
                f"apply cannot take {given}: {type(error).__name__}: {error}", setting="data_shapes"
            ) from error


def _part(entry: Any) -> str:
    """One step of a path through a pytree: a key, an index or the name of an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)

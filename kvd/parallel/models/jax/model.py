"""Any pure function of JAX as a model that a group can bind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

import jax
import numpy as np

from kvd.client.calls.process_bound import ProcessBound
from kvd.errors import ConfigError
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Device, HostArray, Shape
from kvd.parallel.models.bind_plan import plan_bind
from kvd.parallel.models.executor import DeviceExecutor
from kvd.parallel.models.jax.passes import Functions, JaxPasses, LossFunction, outputs_of
from kvd.parallel.models.model import BindOptions, ModelDescription
from kvd.parallel.models.outputs import OutputDescriptions


class JaxModel(ProcessBound):
    """``apply(params, *inputs)`` and its parameters, and optionally a loss.

    - ``params`` is a pytree of arrays. Each leaf is named by its path, joined by dots (``"dense.weight"``,
      ``"0.bias"``), in the order of `jax.tree_util`; a single leaf is ``"params"``.
    - The data arrays are the inputs, in the order of their descriptions; no axis is moved. ``apply`` returns an array,
      or a tuple, list or dict of arrays, named as those of a `kvd.parallel.TorchModel`. It has to be pure: a running
      mean or a dropout key, for example, is passed as data.
    - The loss has to be a mean over the samples (or one value per sample); each device's is scaled by samples of the
      device / samples of the batch.
    - Both are compiled (``jax.jit``) for each shape of the inputs. A forward for training computes outputs and
      gradients at once where there is a loss, and keeps them for backward, which announces the last parameter first.

    Arguments:
        apply: see above; it is the same in training and evaluation.
        params: the initial values. They are copied.
        loss: ``loss(outputs, labels)``. It gets the outputs as ``apply`` returned them, and the label, or a list of
            them if there are several. Without it, backward takes head gradients.

    Raises:
        ConfigError: ``params`` has a leaf that is not an array, or no leaf.
    """

    _NOT_COPYABLE: ClassVar[str] = (
        "a JaxModel cannot be copied, pickled or saved, since groups of this process use it: "
        "save its parameters, and make a model of them in each process"
    )

    def __init__(self, apply: Callable[..., Any], params: Any, loss: LossFunction | None = None) -> None:
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        self.apply = apply
        self.loss = loss
        self._functions = Functions(apply, loss, tree)
        self._values: dict[str, HostArray] = {}
        for path, leaf in leaves:
            name = path_name(path) or "params"
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ConfigError(f"params: {name} is a {type(leaf).__name__}, not an array", setting="params")
            self._values[name] = np.array(leaf)
        if len(self._values) != len(leaves) or not leaves:
            raise ConfigError("params: no arrays, or two of one name", setting="params")
        self._outputs = OutputDescriptions(self._output_shapes, "apply")

    def initial(self) -> dict[str, HostArray]:
        """Copies of the parameters that were given, by name."""
        return {name: value.copy() for name, value in self._values.items()}

    def describe(self, data: Sequence[DataDesc], labels: Sequence[DataDesc] = ()) -> ModelDescription:
        """See `kvd.parallel.Model.describe`. To find the outputs, ``apply`` is traced, not computed.

        Raises:
            ConfigError: ``apply`` cannot take such data; labels without a loss; an output without one axis that counts
                the samples.
        """
        if labels and self.loss is None:
            raise ConfigError("labels are described, but the model has no loss", setting="label_shapes")
        shapes: dict[str, Shape] = {name: value.shape for name, value in self._values.items()}
        return ModelDescription(shapes, {}, self._outputs.of(data), has_loss=self.loss is not None)

    def bind(
        self,
        device: Device | str,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc] = (),
        **options: Unpack[BindOptions],
    ) -> DeviceExecutor[JaxPasses]:
        """See `kvd.parallel.Model.bind`. What is not given starts with the values given to the constructor."""
        aux = options.get("aux")
        if aux:
            raise ConfigError(f"aux has {', '.join(aux)}: a pure function has no states", setting="aux")
        plan = plan_bind(self.describe(data, labels), device, data, labels, **options)
        return DeviceExecutor(plan, JaxPasses(self._functions, self.initial(), plan))

    def _output_shapes(self, descs: Sequence[DataDesc]) -> Mapping[str, tuple[Shape, str]]:
        inputs = [jax.ShapeDtypeStruct(desc.shape, np.dtype(desc.dtype)) for desc in descs]
        structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in self._values.values()]
        params = self._functions.tree.unflatten(structs)
        try:
            outputs = outputs_of(jax.eval_shape(self.apply, params, *inputs))
        except ConfigError:
            raise
        except Exception as error:  # the user's function may raise anything; it says what it cannot take
            given = ", ".join(f"{desc.name} {desc.shape} {desc.dtype}" for desc in descs)
            raise ConfigError(
                f"apply cannot take {given}: {type(error).__name__}: {error}", setting="data_shapes"
            ) from error
        return {name: (tuple(array.shape), np.dtype(array.dtype).name) for name, array in outputs.items()}


def path_name(path: Sequence[Any]) -> str:
    """Return the path of a leaf through a pytree, joined by dots; "" for a tree that is a single leaf."""
    return ".".join(map(_part, path))


def _part(entry: Any) -> str:
    """One step of a path through a pytree: a key, an index or the name of an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)

"""One `Model.bind`, checked: what is bound where, and which gradients it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from kvd.errors import ConfigError, DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device, Shape
from kvd.parallel.models.model import GradReq, ModelDescription


@dataclass(frozen=True)
class BindPlan:
    """The arguments of one `Model.bind` after the checks that all models share; `plan_bind` makes it.

    Attributes:
        device: an existing device.
        data, labels: the inputs.
        description: of the model for these inputs.
        for_training: whether there are gradients.
        requests: name → request, for every parameter and data input.
        params, grads, aux: the arrays that were given, by name. Whether they fit is checked by those who use them.
        samples: of the data of this executor.
        normalization: how many samples the loss is averaged over, at least 1.
        seed: of the random numbers.
    """

    device: Device
    data: tuple[DataDesc, ...]
    labels: tuple[DataDesc, ...]
    description: ModelDescription
    for_training: bool
    requests: Mapping[str, GradReq]
    params: Mapping[str, Array]
    grads: Mapping[str, Array]
    aux: Mapping[str, Array]
    samples: int
    normalization: int
    seed: tuple[int, ...]

    def wants_gradient(self, name: str) -> bool:
        """Whether the gradient of this parameter or data input is computed."""
        return self.requests[name] != "null"

    def trained(self) -> list[str]:
        """The parameters that have a gradient, first layer first."""
        return [name for name in self.description.params if self.wants_gradient(name)]

    def check_inputs(self, inputs: Mapping[str, Array], is_train: bool) -> None:
        """Return if a forward can take these inputs.

        Raises:
            KeyNotFound, NotAllowed, ShapeMismatch: see `Executor.forward`.
        """
        descs = {desc.name: desc for desc in (*self.data, *self.labels)}
        for name, array in inputs.items():
            if name not in descs:
                raise NotAllowed(f"{name!r} was not bound; bound inputs: {', '.join(descs)}", key=name)
            if tuple(array.shape) != descs[name].shape:
                raise ShapeMismatch(f"{name} has shape {array.shape}, but was bound with {descs[name].shape}", key=name)
        for desc in self.data:
            if desc.name not in inputs:
                raise KeyNotFound(f"the data {desc.name!r} is missing", key=desc.name)
        for desc in self.labels if is_train and self.for_training else ():
            if desc.name not in inputs:
                raise KeyNotFound(f"the label {desc.name!r} is bound, and training needs it", key=desc.name)

    def check_head_gradients(self, out_grads: Sequence[Array] | None) -> None:
        """Return if a backward can start from these head gradients, or from the loss if they are None.

        Raises:
            NotAllowed, ShapeMismatch: see `Executor.backward`.
        """
        outputs = self.description.outputs
        if self.description.has_loss:
            if out_grads is not None:
                raise NotAllowed("the model ends in a loss, which starts backward itself: give no head gradients")
            if not self.labels:
                raise NotAllowed(
                    "the loss needs labels for backward: bind them (label_shapes) and give them to forward"
                )
            return
        if out_grads is None or len(out_grads) != len(outputs):
            raise NotAllowed(
                f"head gradients are required: the model has no loss, so give one array per output ({len(outputs)})"
            )
        for desc, head in zip(outputs, out_grads, strict=True):
            if tuple(head.shape) != desc.shape:
                raise ShapeMismatch(f"the head gradient of {desc.name} has shape {head.shape}, not {desc.shape}")


def plan_bind(
    description: ModelDescription,
    device: Device | str,
    data: Sequence[DataDesc],
    labels: Sequence[DataDesc],
    *,
    for_training: bool = True,
    grad_req: GradReq | Mapping[str, GradReq] = "write",
    params: Mapping[str, Array] | None = None,
    grads: Mapping[str, Array] | None = None,
    aux: Mapping[str, Array] | None = None,
    normalization: int | None = None,
    seed: int | tuple[int, ...] = 0,
) -> BindPlan:
    """Check the arguments of `Model.bind`, of which the keywords are described in `BindOptions`.

    Raises:
        ConfigError: the device does not exist, ``normalization`` is below 1, or ``grad_req`` has an unknown request
            or name.
    """
    where = Device.parse(device)
    where.check()
    if normalization is not None and normalization < 1:
        raise ConfigError(f"normalization must be above 0, not {normalization}", setting="normalization")
    samples = next((desc.batch_size for desc in data if desc.batch_size is not None), 1)
    return BindPlan(
        device=where,
        data=tuple(data),
        labels=tuple(labels),
        description=description,
        for_training=for_training,
        requests=_requests(grad_req, list(description.params), [desc.name for desc in data], for_training),
        params=params or {},
        grads=grads or {},
        aux=aux or {},
        samples=samples,
        normalization=normalization or max(samples, 1),  # without samples all gradients are 0, so any divisor will do
        seed=(seed,) if isinstance(seed, int) else tuple(seed),
    )


def check_names(what: str, given: Mapping[str, Array], wanted: Mapping[str, object] | Sequence[str]) -> None:
    """Raise ConfigError if the array of some name is given but not wanted; ``what`` says which argument this is."""
    for name in given:
        if name not in wanted:
            raise ConfigError(f"{what} has {name!r}, which the model does not need here", setting=what)


def check_fits(what: str, name: str, array: Array, shape: Shape, dtype: object) -> None:
    """Raise ShapeMismatch or DtypeMismatch unless the given array has this shape and dtype."""
    if tuple(array.shape) != tuple(shape):
        raise ShapeMismatch(f"{what}: {name} has shape {array.shape}, the model wants {tuple(shape)}", key=name)
    if str(array.dtype) != str(dtype):
        raise DtypeMismatch(f"{what}: {name} has dtype {array.dtype}, the model {dtype}", key=name)


def _requests(
    grad_req: GradReq | Mapping[str, GradReq], params: Sequence[str], inputs: Sequence[str], for_training: bool
) -> dict[str, GradReq]:
    """The request of every parameter and data input; all ``"null"`` if not for training."""
    if isinstance(grad_req, str):
        given: dict[str, GradReq] = dict.fromkeys(params, grad_req)
    else:
        given = dict(grad_req)
    for name, request in given.items():
        if request not in get_args(GradReq):
            raise ConfigError(f'{name}: grad_req {request!r} is none of "write", "add", "null"', setting="grad_req")
        if name not in params and name not in inputs:
            known = ", ".join([*params, *inputs])
            raise ConfigError(
                f"grad_req names {name!r}, which the model does not have; it has {known}", setting="grad_req"
            )
    if not for_training:
        return dict.fromkeys([*params, *inputs], "null")
    resolved: dict[str, GradReq] = {name: given.get(name, "write") for name in params}
    return resolved | {name: given.get(name, "null") for name in inputs}

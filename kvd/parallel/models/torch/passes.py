"""A `TorchModel` bound to one device."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from kvd.errors import ConfigError, DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device
from kvd.parallel.models.model import GradientHook, GradReq, MonitorHook, resolve_grad_req
from kvd.parallel.models.torch.chance import Chance
from kvd.parallel.models.torch.tensors import as_device_array, as_tensor, outputs_of, torch_device
from kvd.parallel.models.torch.threads import share_of_threads

if TYPE_CHECKING:
    from kvd.parallel.models.torch.model import TorchModel


class TorchExecutor:
    """See `kvd.parallel.Executor`; made by `TorchModel.bind`.

    With the same inputs, parameters, states and `step`, forward and backward give the same bits every time, as far as
    torch's operations do (on a CPU: with the same number of threads).

    Attributes:
        device: where the arrays live.
        module: this device's copy; its parameters are over the memory of `params`.
        output_descs: name, shape, dtype and layout of each output.
        step: how many forward passes with ``is_train=True`` there were.
    """

    def __init__(
        self,
        model: TorchModel,
        device: Device,
        data: Sequence[DataDesc],
        labels: Sequence[DataDesc],
        *,
        for_training: bool,
        grad_req: GradReq | Mapping[str, GradReq],
        params: Mapping[str, Array],
        grads: Mapping[str, Array],
        aux: Mapping[str, Array],
        normalization: int | None,
        seed: tuple[int, ...],
    ) -> None:
        device.check()
        where = torch_device(device)
        description = model.describe(data, labels)
        if normalization is not None and normalization < 1:
            raise ConfigError(f"normalization must be above 0, not {normalization}", setting="normalization")
        self.device = device
        self.step = 0
        self.output_descs = description.outputs
        self._loss_function = model.loss
        self._threads, self._turns = model.threads, model.turns
        self._data, self._labels = list(data), list(labels)
        self._for_training = for_training
        self._samples = next((desc.batch_size for desc in data if desc.batch_size is not None), 1)
        self._normalization = normalization or self._samples
        self._grad_req = resolve_grad_req(
            grad_req, list(description.params), [desc.name for desc in data], for_training
        )
        self._chance = Chance(where, seed)
        with device.current():
            self.module = _copy_of(model.module, {**params, **aux}, device, where)
            named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
            self._tensors = {name: named[name] for name in description.params}
            self._states = {name: named[name] for name in description.aux}
            _check_given(params, description.params, "params")
            _check_given(aux, description.aux, "aux")
            self._params = {name: as_device_array(tensor, device) for name, tensor in self._tensors.items()}
            self._aux = {name: as_device_array(tensor, device) for name, tensor in self._states.items()}
            self._params |= params  # the very objects that were given
            self._aux |= aux
            self._grads = self._gradient_arrays(grads)
            self._input_grads = self._input_gradient_arrays()
        self._grad_tensors = {name: as_tensor(array, device) for name, array in self._grads.items()}
        self._hook: GradientHook | None = None
        self._seen: set[str] = set()
        self._stream: Any = None
        for name, tensor in self._tensors.items():
            tensor.requires_grad_(self._grad_req[name] != "null")
            if self._grad_req[name] != "null":
                hook: Any = functools.partial(self._accumulated, name)
                tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._monitors: list[Any] = []
        self._inputs: list[torch.Tensor] = []
        self._outputs: dict[str, torch.Tensor] | None = None
        self._loss: torch.Tensor | None = None
        self._can_go_backward = False

    @property
    def params(self) -> Mapping[str, Array]:
        """Name → parameter, in the order of ``named_parameters``."""
        return MappingProxyType(self._params)

    @property
    def grads(self) -> Mapping[str, Array]:
        """Name → gradient array of each parameter whose request is not ``"null"``."""
        return MappingProxyType(self._grads)

    @property
    def aux(self) -> Mapping[str, Array]:
        """Name → buffer, or parameter that requires no gradient."""
        return MappingProxyType(self._aux)

    @property
    def input_grads(self) -> Mapping[str, Array]:
        """Name → gradient of each data input that one was asked for."""
        return MappingProxyType(self._input_grads)

    @property
    def grad_req(self) -> Mapping[str, GradReq]:
        """Name → request, for every parameter and data input."""
        return MappingProxyType(self._grad_req)

    @property
    def outputs(self) -> list[Array]:
        """The outputs of the last forward. Raises NotAllowed before the first."""
        if self._outputs is None:
            raise NotAllowed("there is no output yet: run forward first")
        return [as_device_array(tensor, self.device) for tensor in self._outputs.values()]

    @property
    def loss(self) -> float:
        """This device's part of the mean loss of the batch, of the last forward for training.

        Raises:
            NotAllowed: there was none, or the model has no loss.
        """
        if self._loss is None:
            raise NotAllowed("there is no loss: it is computed by a forward for training, with labels")
        return float(self._loss)

    def set_monitor(self, hook: MonitorHook | None) -> None:
        """Call ``hook(name, array)`` with the output of every module that has no modules inside; None ends it."""
        for handle in self._monitors:
            handle.remove()
        self._monitors = []
        if hook is None:
            return
        for name, module in self.module.named_modules():
            if next(module.children(), None) is None:
                self._monitors.append(module.register_forward_hook(functools.partial(self._show, hook, name)))

    def forward(self, inputs: Mapping[str, Array], is_train: bool) -> list[Array]:
        """See `kvd.parallel.Executor.forward`. Also raises what the module raises."""
        self._check_inputs(inputs, is_train)
        self._can_go_backward, self._loss = False, None
        with_graph = is_train and self._for_training
        self.module.train(is_train)
        with self._current(), torch.set_grad_enabled(with_graph), self._chance.of_step(self.step, is_train):
            self._inputs = [as_tensor(inputs[desc.name], self.device) for desc in self._data]
            for desc, tensor in zip(self._data, self._inputs, strict=True):
                if with_graph and self._grad_req[desc.name] != "null":
                    tensor.requires_grad_()
            returned = self.module(*self._inputs)
            outputs = self._checked_outputs(returned)
            if with_graph and self._loss_function is not None and self._labels:
                self._loss = self._scaled_loss(self._loss_function, returned, inputs)
            self._keep_states()
        self._outputs = outputs
        if is_train:
            self.step += 1
            self._can_go_backward = True
        return self.outputs

    def backward(self, out_grads: Sequence[Array] | None = None, on_gradient: GradientHook | None = None) -> None:
        """See `kvd.parallel.Executor.backward`."""
        roots, heads = self._roots(out_grads)
        self._can_go_backward = False
        self._hook, self._seen = on_gradient, set()
        with self._current():
            self._stream = self.device.xp.cuda.get_current_stream() if self.device.is_cuda else None
            try:
                torch.autograd.backward(roots, heads)
            finally:
                self._hook, hook = None, self._hook
                for tensor in self._tensors.values():
                    tensor.grad = None
            self._put_input_gradients()
            for name in reversed(list(self._grads)):
                if name not in self._seen:  # it has no part in this objective
                    if self._grad_req[name] == "write":
                        self._grad_tensors[name].zero_()
                    if hook is not None:
                        hook(name)
        if self._outputs is not None:  # the graph is used up: let its memory go
            self._outputs = {name: tensor.detach() for name, tensor in self._outputs.items()}
        self._inputs = []
        if self._loss is not None:
            self._loss = self._loss.detach()

    def use_gradients(self, arrays: Mapping[str, Array]) -> None:
        """See `kvd.parallel.Executor.use_gradients`."""
        _check_given(arrays, self._grads, "grads")
        for name, array in arrays.items():
            _check_fits("grads", name, array, self._params[name])
        self._grads.update(arrays)
        self._grad_tensors.update({name: as_tensor(array, self.device) for name, array in arrays.items()})

    def _accumulated(self, name: str, tensor: torch.Tensor) -> None:
        """torch has the gradient of a parameter. On CUDA this is one of torch's threads and streams, not ours.

        It always computes into memory of its own. Given our array as ``.grad`` it would add to that: zeros first, then
        a read more than this copy has, and -0.0 would become 0.0.
        """
        target, gradient = self._grad_tensors[name], tensor.grad
        assert gradient is not None
        with self._stream_of_lane(), torch.no_grad():
            if self._grad_req[name] == "add":
                target.add_(gradient)
            else:
                target.copy_(gradient)
            tensor.grad = None
            self._seen.add(name)
            if self._hook is not None:
                self._hook(name)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """torch works with this lane's share of the threads and, on CUDA, on the lane's stream."""
        if not self.device.is_cuda:
            with self._turns, share_of_threads(self._threads):
                yield
            return
        stream = self.device.xp.cuda.get_current_stream()
        with torch.cuda.stream(_torch_stream(stream, self.device)):
            yield

    @contextlib.contextmanager
    def _stream_of_lane(self) -> Iterator[None]:
        """Inside torch's backward: the stream of the lane is current for both libraries, after what torch queued."""
        if self._stream is None:
            yield
            return
        ours = _torch_stream(self._stream, self.device)
        ours.wait_stream(torch.cuda.current_stream(self.device.index))
        with self.device.current(), self._stream, torch.cuda.stream(ours):
            yield

    def _check_inputs(self, inputs: Mapping[str, Array], is_train: bool) -> None:
        descs = {desc.name: desc for desc in (*self._data, *self._labels)}
        for name, array in inputs.items():
            if name not in descs:
                raise NotAllowed(f"{name!r} was not bound; bound inputs: {', '.join(descs)}", key=name)
            if tuple(array.shape) != descs[name].shape:
                raise ShapeMismatch(f"{name} has shape {array.shape}, but was bound with {descs[name].shape}", key=name)
        for desc in self._data:
            if desc.name not in inputs:
                raise KeyNotFound(f"the data {desc.name!r} is missing", key=desc.name)
        for desc in self._labels if is_train and self._for_training else []:
            if desc.name not in inputs:
                raise KeyNotFound(f"the label {desc.name!r} is bound, and training needs it", key=desc.name)

    def _checked_outputs(self, returned: Any) -> dict[str, torch.Tensor]:
        outputs = outputs_of(returned)
        got = [(name, tuple(tensor.shape)) for name, tensor in outputs.items()]
        wanted = [(desc.name, desc.shape) for desc in self.output_descs]
        if got != wanted:
            raise ShapeMismatch(f"the module returned {got}, but was described as {wanted}")
        return outputs

    def _scaled_loss(self, function: Any, returned: Any, inputs: Mapping[str, Array]) -> torch.Tensor:
        """The loss, scaled so that the sum over the devices is the mean over the batch."""
        labels = [as_tensor(inputs[desc.name], self.device) for desc in self._labels]
        loss = function(returned, labels[0] if len(labels) == 1 else labels)
        if not isinstance(loss, torch.Tensor) or tuple(loss.shape) not in ((), (self._samples,)):
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"the loss gave {shape}: it has to be one number, or one per sample", setting="loss")
        if loss.ndim or getattr(function, "reduction", "mean") == "sum":
            return loss.sum() / self._normalization
        return loss * (self._samples / self._normalization)

    def _keep_states(self) -> None:
        """A module may replace a buffer by a new tensor instead of writing into it: the arrays stay the same."""
        for name, state in self._states.items():
            path, _, leaf = name.rpartition(".")
            owner = self.module.get_submodule(path)
            current = getattr(owner, leaf)
            if current is not state:
                with torch.no_grad():
                    state.copy_(current)
                setattr(owner, leaf, state)

    def _roots(self, out_grads: Sequence[Array] | None) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Where backward starts, and with which gradients."""
        if not self._for_training:
            raise NotAllowed("not bound for training: re-bind with for_training=True to run backward")
        if not self._can_go_backward or self._outputs is None:
            raise NotAllowed("backward needs a forward with is_train=True since the last backward")
        if self._loss_function is not None:
            if out_grads is not None:
                raise NotAllowed("the model ends in a loss, which starts backward itself: give no head gradients")
            if self._loss is None:
                raise NotAllowed(
                    "the loss needs labels for backward: bind them (label_shapes) and give them to forward"
                )
            return [self._loss], [None]
        count = len(self._outputs)
        if out_grads is None or len(out_grads) != count:
            raise NotAllowed(
                f"head gradients are required: the model has no loss, so give one array per output ({count})"
            )
        roots: list[torch.Tensor] = []
        heads: list[torch.Tensor | None] = []
        for (name, output), head in zip(self._outputs.items(), out_grads, strict=True):
            if tuple(head.shape) != tuple(output.shape):
                raise ShapeMismatch(f"the head gradient of {name} has shape {head.shape}, not {tuple(output.shape)}")
            if output.requires_grad:
                own = head if self.device.is_cuda else self.device.xp.require(head, requirements=["C", "W"])
                roots.append(output)
                heads.append(as_tensor(self.device.xp.asarray(own), self.device).to(output.dtype))
        return roots, heads

    def _put_input_gradients(self) -> None:
        for desc, tensor in zip(self._data, self._inputs, strict=True):
            if desc.name not in self._input_grads:
                continue
            target = as_tensor(self._input_grads[desc.name], self.device)
            if self._grad_req[desc.name] == "write":
                target.zero_()
            if tensor.grad is not None:
                target += tensor.grad

    def _gradient_arrays(self, given: Mapping[str, Array]) -> dict[str, Array]:
        wanted = {name: tensor for name, tensor in self._tensors.items() if self._grad_req[name] != "null"}
        _check_given(given, {name: tuple(tensor.shape) for name, tensor in wanted.items()}, "grads")
        xp, arrays = self.device.xp, {}
        for name in wanted:
            like = self._params[name]
            arrays[name] = given[name] if name in given else xp.zeros(like.shape, dtype=like.dtype)
            _check_fits("grads", name, arrays[name], like)
        return arrays

    def _input_gradient_arrays(self) -> dict[str, Array]:
        arrays = {}
        for desc in self._data:
            if self._grad_req[desc.name] != "null":
                if not getattr(torch, desc.dtype).is_floating_point:
                    raise ConfigError(f"{desc.name} is {desc.dtype}, which has no gradient", setting="grad_req")
                arrays[desc.name] = self.device.xp.zeros(desc.shape, dtype=desc.dtype)
        return arrays

    def _show(self, hook: MonitorHook, name: str, _module: Any, _inputs: Any, output: Any) -> None:
        for own_name, tensor in outputs_of(output).items():
            hook(f"{name or 'module'}_{own_name}", as_device_array(tensor, self.device))


def _torch_stream(stream: Any, device: Device) -> torch.cuda.Stream:
    """torch's handle of a stream of CuPy."""
    return torch.cuda.ExternalStream(stream.ptr, device=device.index)  # type: ignore[no-untyped-call]


def _copy_of(
    module: torch.nn.Module, given: Mapping[str, Array], device: Device, where: torch.device
) -> torch.nn.Module:
    """A copy on ``where`` that shares nothing with ``module``, over the memory of the arrays that are given."""
    memo: dict[int, Any] = {}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, array in given.items():
        if name in tensors:
            own = as_tensor(array, device)
            _check_fits("params", name, array, tensors[name])
            is_parameter = isinstance(tensors[name], torch.nn.Parameter)
            requires = tensors[name].requires_grad
            memo[id(tensors[name])] = torch.nn.Parameter(own, requires_grad=requires) if is_parameter else own
    copied = copy.deepcopy(module, memo)
    return copied.to(where)


def _check_given(given: Mapping[str, Array], wanted: Mapping[str, Any], what: str) -> None:
    for name in given:
        if name not in wanted:
            raise ConfigError(f"{what} has {name!r}, which the model does not need here", setting=what)


def _check_fits(what: str, name: str, array: Array, like: Any) -> None:
    if tuple(array.shape) != tuple(like.shape):
        raise ShapeMismatch(f"{what}: {name} has shape {array.shape}, the model wants {tuple(like.shape)}", key=name)
    dtype = str(like.dtype).removeprefix("torch.")
    if str(array.dtype) != dtype:
        raise DtypeMismatch(f"{what}: {name} has dtype {array.dtype}, the module {dtype}", key=name)

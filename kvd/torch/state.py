"""The state of a training with ``where="workers"``: what a worker has in its memory, and gives to a restarted one.

It is the parameters, the optimizer's state, the buffers of the module, the hyperparameters of the groups, and what the
program keeps beside them. The tensors travel as bytes in the order of memory, and are written where they are: neither a
parameter nor a state changes its dtype or its place. All else travels in the layout (`kvd.torch.objects`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch

from kvd.client.calls.process_bound import ProcessBound
from kvd.client.calls.values import Array
from kvd.errors import NotAllowed, ProtocolError
from kvd.parallel.device import Device
from kvd.parallel.models.torch.tensors import as_tensor, host_copy
from kvd.torch.buffers import ModuleBuffers
from kvd.torch.objects import from_bytes, to_bytes
from kvd.torch.parameters import Named

HOST = Device("cpu")


@runtime_checkable
class Keeps(Protocol):
    """Something with a state of plain values and tensors, such as a scheduler or a `torch.amp.GradScaler`."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Kept(NamedTuple):
    """How to read and to replace something that the program keeps."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


class _Piece(NamedTuple):
    """A tensor of the state, at its place among the bytes."""

    begin: int
    end: int
    tensor: torch.Tensor  # flat, of uint8


def kept(name: str, thing: object) -> Kept:
    """Return how a thing is read and replaced.

    Raises:
        NotAllowed: it has no `state_dict` and is no pair of functions; or its state cannot travel.
    """
    if isinstance(thing, ProcessBound):
        raise NotAllowed(
            f"keep({name!r}, …) would keep the state of an optimizer of kvd.torch, and not its parameters: one "
            f"optimizer of a store passes its state on, so give that one the parameters of both, in groups of their own"
        )
    if isinstance(thing, Keeps):
        found = Kept(thing.state_dict, thing.load_state_dict)
    elif isinstance(thing, tuple) and len(thing) == 2 and all(map(callable, thing)):
        found = Kept(*thing)
    else:
        raise NotAllowed(
            f"keep({name!r}, …) takes something with state_dict and load_state_dict, or a pair (get, put) of "
            f"functions, not a {type(thing).__name__}"
        )
    to_bytes(found.get())  # raises here, rather than when another worker needs it
    return found


class TrainingState:
    """A `kvd.client.calls.healing.StateHolder` of a torch training.

    Args:
        optimizer: the wrapped one.
        named: its parameters, and frozen ones, in the order of the model.
        buffers: of the model; None: it is not known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Sequence[Named], buffers: ModuleBuffers | None):
        self._optimizer = optimizer
        self._named = list(named)
        self._buffers = buffers
        self._kept: dict[str, Kept] = {}
        self._copies: list[torch.Tensor] = []  # of the buffers
        self._forms: list[tuple[torch.dtype, torch.Size]] = []  # of the copies
        self._is_checked = False  # the state that the optimizer makes in its first step can travel
        self._is_in_step = False  # the copies are what the buffers were before it
        self._pieces: list[_Piece] = []  # of the state that is being read or written
        self._later: list[tuple[Callable[[Any], Any], Any]] = []  # what is replaced at the end
        for name, tensor in [*self._named, *self._live_buffers().items()]:
            _flat(name, tensor)

    def title(self) -> str:
        return f"{type(self._optimizer).__name__} with the parameter {self._named[0][0]!r}"

    def keep(self, name: str, thing: object) -> None:
        """Take something of the program along.

        Raises:
            NotAllowed: see `kept`; or the name is taken.
        """
        if name in self._kept:
            raise NotAllowed(f"keep({name!r}, …) was called before: give each thing its own name")
        self._kept[name] = kept(name, thing)

    # ── the steps ──

    def begin_step(self) -> None:
        """A step begins, whose forward pass changes the buffers."""
        live = list(self._live_buffers().values())
        forms = [(buffer.dtype, buffer.shape) for buffer in live]
        with torch.no_grad():
            if forms != self._forms:
                self._forms = forms
                self._copies = [torch.empty_like(buffer) for buffer in live]
            if live:
                torch._foreach_copy_(self._copies, live)
        self._is_in_step = True

    def end_step(self) -> None:
        """The step is over, and the buffers are those after it.

        Raises:
            NotAllowed: after the first step, the optimizer's state cannot travel.
        """
        self._is_in_step = False
        if not self._is_checked:
            self._is_checked = True
            self.layout()

    def _live_buffers(self) -> dict[str, torch.Tensor]:
        return {} if self._buffers is None else self._buffers.live()

    def _buffers_of_step(self) -> dict[str, torch.Tensor]:
        """The buffers as they were before the present step."""
        live = self._live_buffers()
        return dict(zip(live, self._copies, strict=True)) if self._is_in_step else live

    # ── read ──

    def layout(self) -> bytes:
        state = [self._state_of(parameter) for _, parameter in self._named]
        tensors = list(self._tensors())
        self._pieces = _pieces_of(tensors)
        return to_bytes(
            {
                "parameters": [[name, *_form(tensor)] for name, tensor in self._named],
                "buffers": [[name, *_form(tensor)] for name, tensor in self._buffers_of_step().items()],
                "state": [
                    [
                        [key, (*_form(value), value.device.type == "cpu"), None]
                        if _is_tensor(value)
                        else [key, None, value]
                        for key, value in sorted(entries.items())
                    ]
                    for entries in state
                ],
                "other": self._other_state(),
                "groups": [_hyperparameters(group) for group in self._optimizer.param_groups],
                "kept": {name: thing.get() for name, thing in self._kept.items()},
            }
        )

    def nbytes(self) -> int:
        return self._pieces[-1].end if self._pieces else 0

    def read(self, offset: int, target: memoryview) -> None:
        into = torch.frombuffer(target, dtype=torch.uint8)
        self._copy(offset, len(target), lambda piece, own, place: into[place].copy_(piece[own]))

    def weights(self) -> dict[str, Array]:
        return {name: host_copy(parameter) for name, parameter in self._named}

    def weights_nbytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for _, parameter in self._named)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, in the order in which they travel."""
        yield from self._named
        yield from self._buffers_of_step().items()
        for name, parameter in self._named:
            for key, value in sorted(self._state_of(parameter).items()):
                if _is_tensor(value):
                    yield f"{name}, {key}", value

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: Any = self._optimizer.state
        return dict(state[parameter]) if parameter in state else {}

    def _other_state(self) -> dict[Any, Any]:
        """What some optimizers keep for all parameters together."""
        return {key: value for key, value in self._optimizer.state.items() if not _is_tensor(key)}

    def _replace_other_state(self, values: Mapping[Any, Any]) -> None:
        own: Any = self._optimizer.state
        for key in self._other_state():
            del own[key]
        own.update(values)

    def _copy(self, offset: int, nbytes: int, copy: Callable[[torch.Tensor, slice, slice], Any]) -> None:
        """Call `copy` for each tensor in a range of the bytes, with its part of the range, and where that is in it."""
        with torch.no_grad():
            for piece in self._pieces:
                begin, end = max(piece.begin, offset), min(piece.end, offset + nbytes)
                if begin < end:
                    own = slice(begin - piece.begin, end - piece.begin)
                    copy(piece.tensor, own, slice(begin - offset, end - offset))

    # ── write ──

    def begin_write(self, layout: bytes, donor: str) -> int:
        found = from_bytes(layout)
        try:
            parameters, buffers, state = found["parameters"], found["buffers"], found["state"]
            other, groups, kept_states = found["other"], found["groups"], found["kept"]
        except (TypeError, KeyError) as error:
            raise ProtocolError(f"the state of {donor} has a layout of another form") from error
        self._check_like("parameter", self._named, parameters, donor)
        self._check_like("buffer", list(self._live_buffers().items()), buffers, donor)
        self._check_groups(groups, donor)
        if sorted(kept_states) != sorted(self._kept):
            raise NotAllowed(
                f"{donor} keeps {_names(kept_states)}, and this worker {_names(self._kept)}: call optimizer.keep for "
                f"the same things in all workers, before the first step"
            )
        self._make_state(state)
        self._is_in_step = False
        self._pieces = _pieces_of(list(self._tensors()))
        own = zip(self._optimizer.param_groups, groups, strict=True)
        self._later = [(self._replace_other_state, other)]
        self._later += [(partial(_replace, group), values) for group, values in own]
        self._later += [(self._kept[name].put, value) for name, value in kept_states.items()]
        return self.nbytes()

    def write(self, offset: int, data: memoryview) -> None:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._copy(offset, len(data), lambda piece, own, place: piece[own].copy_(source[place]))

    def write_weight(self, key: str, value: Array) -> None:
        with torch.no_grad():
            dict(self._named)[key].copy_(as_tensor(value.copy(), HOST))

    def end_write(self) -> None:
        for put, value in self._later:
            put(value)
        self._later = []

    def _check_like(self, kind: str, own: Sequence[tuple[str, Any]], theirs: Sequence[Any], donor: str) -> None:
        mine = [[name, *_form(tensor)] for name, tensor in own]
        for place in range(max(len(mine), len(theirs))):
            here, there = (_shown(kind, entries, place) for entries in (mine, theirs))
            if here != there:
                raise NotAllowed(
                    f"this worker has {here} where {donor} has {there}: run the same program, with the same model, in "
                    f"all workers",
                    key=str(mine[place][0]) if place < len(mine) else "",
                )

    def _check_groups(self, groups: Sequence[Any], donor: str) -> None:
        own = self._optimizer.param_groups
        names = [sorted(_hyperparameters(group)) for group in own]
        if names != [sorted(group) for group in groups]:
            raise NotAllowed(
                f"this worker's optimizer, {type(self._optimizer).__name__}, has other groups or hyperparameters than "
                f"that of {donor}: make the same optimizer in all workers"
            )

    def _make_state(self, state: Sequence[Any]) -> None:
        """Make the optimizer's state as the layout says: optimizers make it in their first step. What fits stays."""
        own: Any = self._optimizer.state
        for (_, parameter), entries in zip(self._named, state, strict=True):
            before = self._state_of(parameter)
            after = {}
            for key, form, value in entries:
                if form is None:
                    after[key] = value
                    continue
                dtype, shape, stride, is_on_cpu = form
                device = torch.device("cpu") if is_on_cpu else parameter.device
                tensor = before.get(key)
                if not _is_tensor(tensor) or [*_form(tensor), tensor.device] != [dtype, shape, stride, device]:
                    tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
                after[key] = tensor
            if entries:
                own[parameter] = after
            else:
                own.pop(parameter, None)


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _replace(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a group these hyperparameters; tensors, which others refer to, stay where they are."""
    for name, value in values.items():
        if _is_tensor(group[name]) and _is_tensor(value):
            group[name].copy_(value)
        else:
            group[name] = value


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _form(tensor: torch.Tensor) -> list[Any]:
    """Dtype, shape and strides."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())]


def _shown(kind: str, entries: Sequence[Any], place: int) -> str:
    if place >= len(entries):
        return f"no more {kind}s"
    name, dtype, shape, stride = entries[place]
    return f"the {kind} {name!r} ({dtype}, shape {tuple(shape)}, strides {tuple(stride)})"


def _names(entries: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(entries))) or "nothing"


def _flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, as a flat tensor of bytes."""
    flat = tensor.detach()
    if not flat.is_contiguous():
        if not torch.ops.aten.is_non_overlapping_and_dense(flat):
            raise NotAllowed(f"{name!r} has gaps in its memory: make it contiguous before the optimizer is wrapped")
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.reshape(-1).view(torch.uint8)


def _pieces_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[_Piece]:
    pieces = []
    end = 0
    for name, tensor in tensors:
        flat = _flat(name, tensor)
        begin, end = end, end + flat.numel()
        pieces.append(_Piece(begin, end, flat))
    return pieces

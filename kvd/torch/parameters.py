"""The parameters of a torch optimizer under their names, and the proof that all workers have the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kvd.client.calls.backend import Rounds
from kvd.errors import NotAllowed
from kvd.protocol.messages import MAX_TEXT_CHARS

Named = tuple[str, torch.nn.Parameter]

DTYPES = {torch.float32: 4, torch.float64: 8, torch.float16: 2, torch.bfloat16: 2}
"""The dtypes of parameters that can be trained, and bytes of an element."""

_OF_COMPILED = "_orig_mod."  # torch.compile puts it into names
_SHOWN = 3


class ModelParameters(NamedTuple):
    """The parameters of one optimizer, each under the name that it has in `state_dict`.

    Attributes:
        trained: those that need gradients, in the order of `named_parameters`.
        frozen: the others.
    """

    trained: Sequence[Named]
    frozen: Sequence[Named]

    def lines(self) -> list[str]:
        """One line per parameter, equal in two workers if the parameter fits in both."""
        entries = [(name, parameter, "") for name, parameter in self.trained]
        entries += [(name, parameter, " frozen") for name, parameter in self.frozen]
        return [f"{name} {tuple(value.shape)} {_dtype_name(value)}{how}" for name, value, how in entries]


def parameters_of(optimizer: torch.optim.Optimizer, named_parameters: object) -> ModelParameters:
    """Return the parameters of an optimizer under their names. Of tied parameters the first name counts.

    Args:
        named_parameters: pairs of a name and a parameter, such as ``model.named_parameters()``.

    Raises:
        NotAllowed: these are no such pairs; a name stands for two parameters; the optimizer has a parameter that has no
            name, or lacks one that needs gradients; none needs gradients; or one cannot be trained here.
    """
    named: dict[str, torch.nn.Parameter] = {}
    names: dict[int, str] = {}
    for given, parameter in _pairs(named_parameters):
        name = given.replace(_OF_COMPILED, "")
        if id(parameter) in names:
            continue
        if name in named:
            raise NotAllowed(f"named_parameters has two parameters of the name {name!r}: give each its own name")
        named[name] = parameter
        names[id(parameter)] = name
    owned = {id(entry) for group in optimizer.param_groups for entry in group["params"]}
    _check_all_named(optimizer, names)
    missing = [name for name, value in named.items() if value.requires_grad and id(value) not in owned]
    if missing:
        raise NotAllowed(
            f"the optimizer does not have {_list(missing)}, which named_parameters has: give the optimizer all "
            f"parameters that are to be trained, freeze the others (requires_grad_(False)), or leave them out of "
            f"named_parameters",
            key=missing[0],
        )
    trained = [(name, value) for name, value in named.items() if value.requires_grad]
    if not trained:
        raise NotAllowed("no parameter needs gradients: wrap the optimizer after the layers that are trained are made")
    for name, value in named.items():
        _check_kind(name, value)
    return ModelParameters(trained, [(name, value) for name, value in named.items() if not value.requires_grad])


def _pairs(named_parameters: object) -> Iterator[Named]:
    if not isinstance(named_parameters, Iterable):
        kind = type(named_parameters).__name__
        raise NotAllowed(f"named_parameters is model.named_parameters(), or pairs like those, not a {kind}")
    for entry in named_parameters:
        pair: Any = entry
        if isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str):
            if not isinstance(entry[1], torch.Tensor):
                raise NotAllowed(f"named_parameters has {type(entry[1]).__name__} under the name {entry[0]!r}")
            yield pair[0], pair[1]
        else:
            hint = " (model.parameters() has no names)" if isinstance(entry, torch.Tensor) else ""
            text = f"named_parameters has a {type(entry).__name__} where a pair of a name and a parameter belongs{hint}"
            raise NotAllowed(f"{text}: pass model.named_parameters()")


def _check_all_named(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    for place, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise NotAllowed(
                    f"the optimizer has a parameter of shape {shape} (group {place}) that named_parameters does not "
                    f"name: pass the named_parameters() of every module that it updates; names of two modules need "
                    f"prefixes, such as named_parameters(prefix='generator')"
                )


def _check_kind(name: str, parameter: torch.nn.Parameter) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        text = "is of a lazy module and has no shape yet: call the module once on a batch, then wrap its optimizer"
    elif parameter.device.type == "meta":
        text = "is on the device meta and has no elements: give it memory first, with module.to_empty()"
    elif parameter.layout != torch.strided:
        text = f"has the layout {parameter.layout}: only dense parameters can be trained"
    elif parameter.requires_grad and parameter.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        text = f"has the dtype {_dtype_name(parameter)}: parameters that are trained have one of {known}"
    else:
        return
    raise NotAllowed(f"parameter {name!r} {text}", key=name)


def check_agreement(rounds: Rounds, rank: int, parameters: Sequence[str]) -> None:
    """Return if all workers have the same lines, otherwise raise in all of them. All call it at the same place.

    A worker that takes the place of another one meets nobody, and is checked by what it asks of the keys.

    Args:
        rank: of this worker. The lines of worker 0 count.
        parameters: see `ModelParameters.lines`, and whatever else must be equal.

    Raises:
        NotAllowed: a worker has other lines; it names the worker and the first line that differs.
        BarrierBroken: a worker died before it came.
    """
    pieces = _pieces(parameters)
    digest = hashlib.sha256("\n".join(parameters).encode()).hexdigest()
    theirs = rounds.meet("parameters", f"{digest} {len(pieces)}" if rank == 0 else None).wait().split()
    differs = len(theirs) == 2 and theirs[0] != digest
    if not rounds.meet("parameters differ", str(rank) if differs else None).wait():
        return
    expected = "".join(
        rounds.meet("parameters of worker 0", pieces[place] if rank == 0 else None).wait()
        for place in range(int(theirs[1]) if len(theirs) == 2 else 0)
    )
    text = _difference(rank, parameters, expected.split("\n")) if differs else None
    raise NotAllowed(rounds.meet("parameters are", text).wait() or "the workers have different parameters")


def _pieces(lines: Sequence[str]) -> list[str]:
    text = "\n".join(lines)
    return [text[start : start + MAX_TEXT_CHARS] for start in range(0, len(text), MAX_TEXT_CHARS)]


def _difference(rank: int, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """The text for all workers about the first line that differs."""
    for place in range(max(len(mine), len(theirs))):
        own, other = (lines[place] if place < len(lines) else "no parameter" for lines in (mine, theirs))
        if own != other:
            break
    text = f"the workers wrap different models: worker {rank} has {own!r:.300} where worker 0 has {other!r:.300}"
    return f"{text}. Make the same model, and wrap it with the same options, in all workers"


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"

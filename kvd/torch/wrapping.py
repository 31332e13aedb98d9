"""A torch optimizer around another one, and the parameters of both by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.nn import Parameter

from kvd.client.calls.process_bound import ProcessBound
from kvd.errors import NotAllowed

COMPILED_PREFIX = "_orig_mod."
_OF_GRAD_SCALER = ("grad_scale", "found_inf")


class WrappedOptimizer(ProcessBound, torch.optim.Optimizer):
    """A torch optimizer by `isinstance` that shares parameter groups, state and hooks with the one it wraps.

    Learning rate schedulers and `GradScaler` take it like any other optimizer.

    Args:
        optimizer: the one to wrap.

    Raises:
        NotAllowed: it is no torch optimizer, or wraps one already.
    """

    _NOT_COPYABLE: ClassVar[str] = (
        "an optimizer of kvd.torch cannot be copied or pickled, since it belongs to the store of this process: save "
        "its state_dict()"
    )

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # The base class would make parameter groups, state and hooks of its own.
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise NotAllowed(f"a torch optimizer is wanted, such as torch.optim.AdamW(…), not {optimizer!r:.80}")
        if isinstance(optimizer, WrappedOptimizer):
            raise NotAllowed(f"a {type(optimizer).__name__} is wrapped already: pass the torch optimizer inside it")
        self._wrapped = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":  # not set yet
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._wrapped!r}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like `torch.optim.Optimizer.zero_grad`."""
        self._wrapped.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer."""
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state into the wrapped optimizer."""
        self._wrapped.load_state_dict(dict(state_dict))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not allowed: the parameters are keys of the store by now.

        Raises:
            NotAllowed: always.
        """
        name = type(self).__name__
        raise NotAllowed(f"add all parameter groups to the torch optimizer before it is given to {name}")

    def step_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step of the wrapped optimizer, and return what it returns."""
        with self._attributes_of_grad_scaler():
            return self._wrapped.step(*args, **kwargs)

    @contextmanager
    def _attributes_of_grad_scaler(self) -> Iterator[None]:
        """Lend the wrapped optimizer what GradScaler has set on this one; fused optimizers read it from themselves."""
        given = {name: self.__dict__[name] for name in _OF_GRAD_SCALER if name in self.__dict__}
        for name, value in given.items():
            setattr(self._wrapped, name, value)
        try:
            yield
        finally:
            for name in given:
                delattr(self._wrapped, name)


class NamedParameters:
    """The parameters of an optimizer and their names.

    Args:
        optimizer: its groups hold the parameters that are trained.
        named_parameters: as ``module.named_parameters()`` gives them. The prefix of compiled modules is removed. A
            parameter with two names (tied weights) has the first one.

    Attributes:
        trained: name → parameter, of those that the optimizer changes, in the order of `named_parameters`.
        frozen: name → parameter, of those without ``requires_grad``.

    Raises:
        NotAllowed: a parameter of the optimizer has no name; one that requires gradients is not in the optimizer; two
            have the same name; or there is nothing to train.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        self._optimizer = optimizer
        named: dict[str, Parameter] = {}
        names: dict[int, str] = {}
        for entry in named_parameters:
            name, parameter = _named(entry)
            if id(parameter) in names:
                continue
            if name in named:
                raise NotAllowed(f"two parameters are called {name!r}: give them names of their own")
            named[name] = parameter
            names[id(parameter)] = name
        in_optimizer = set()
        for place, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise NotAllowed(
                        f"parameter {number} of group {place} of the optimizer, of shape {tuple(parameter.shape)}, has "
                        f"no name: pass the named_parameters() of all modules that the optimizer trains"
                    )
                in_optimizer.add(id(parameter))
        for name, parameter in named.items():
            if parameter.requires_grad and id(parameter) not in in_optimizer:
                raise NotAllowed(
                    f"parameter {name!r} requires gradients, but the optimizer does not have it: add it there, freeze "
                    f"it with requires_grad_(False), or leave it out of named_parameters"
                )
        self.trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        self._number = len(in_optimizer)
        self._layouts = {name: _layout(parameter) for name, parameter in self.trained.items()}
        if not self.trained:
            raise NotAllowed("the optimizer has no parameter that requires gradients: there is nothing to train")

    def describe(self) -> dict[str, str]:
        """The dtype and shape of every parameter, for the comparison with other workers."""
        trained = {name: _spec(parameter) for name, parameter in self.trained.items()}
        return {**trained, **{name: f"frozen {_spec(parameter)}" for name, parameter in self.frozen.items()}}

    def check_unchanged(self, names: Iterable[str]) -> None:
        """Check that these parameters are as they were when they were wrapped.

        Raises:
            NotAllowed: one was moved, frozen, or given another dtype or shape; or the optimizer was given other ones.
        """
        if len({id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}) != (
            self._number
        ):
            raise NotAllowed("the optimizer was given other parameters after it was wrapped: add all of them before")
        for name in names:
            parameter = self.trained[name]
            if not parameter.requires_grad:
                raise NotAllowed(
                    f"parameter {name!r} was frozen after the optimizer was wrapped: freeze it before, on all workers"
                )
            if _layout(parameter) != self._layouts[name]:
                was, now = (" ".join(map(str, layout)) for layout in (self._layouts[name], _layout(parameter)))
                raise NotAllowed(
                    f"parameter {name!r} was {was} when the optimizer was wrapped, and is {now} now: call "
                    f"model.to(…) before"
                )


def _named(entry: Any) -> tuple[str, Parameter]:
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
        raise NotAllowed("named_parameters are pairs of a name and a parameter, as module.named_parameters() has them")
    if not isinstance(entry[1], torch.Tensor):
        raise NotAllowed(f"{entry[0]!r} is no parameter, but {entry[1]!r:.80}")
    return entry[0].replace(COMPILED_PREFIX, ""), entry[1]  # type: ignore[return-value]


def _layout(parameter: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    return str(parameter.dtype), tuple(parameter.shape), f"on {parameter.device}"


def _spec(parameter: torch.Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}"

"""A torch optimizer around another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from kvd.client.calls.process_bound import ProcessBound
from kvd.errors import NotAllowed

_OF_GRAD_SCALER = ("grad_scale", "found_inf")


class WrappedOptimizer(ProcessBound, torch.optim.Optimizer):
    """A torch optimizer by `isinstance` that shares parameter groups, state and hooks with the one it wraps.

    Learning rate schedulers and ``GradScaler`` take it like any other optimizer.

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
        if isinstance(optimizer, ProcessBound):
            raise NotAllowed(f"a {type(optimizer).__name__} is wrapped already: pass the torch optimizer inside it")
        self._wrapped = optimizer
        self._num_parameters = self._count()

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
        raise _parameters_added()

    def check_parameters(self) -> None:
        """Raise NotAllowed if the wrapped optimizer has got parameters since it was wrapped."""
        if self._count() != self._num_parameters:
            raise _parameters_added()

    def _count(self) -> int:
        return sum([len(group["params"]) for group in self._wrapped.param_groups])

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


def _parameters_added() -> NotAllowed:
    """The error for parameters that come after the optimizer was wrapped."""
    return NotAllowed("parameters cannot be added to an optimizer that is wrapped: add them first, then wrap it")

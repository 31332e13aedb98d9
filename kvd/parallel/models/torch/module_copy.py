"""A torch module on one device, over the arrays of an executor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from kvd.parallel.device import Array, Device
from kvd.parallel.models.bind_plan import check_fits
from kvd.parallel.models.torch.tensors import as_tensor, dtype_name


def trained_and_states(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters that are trained; and states: parameters that are not, and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    params = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    aux = {name: tensor for name, tensor in tensors.items() if not tensor.requires_grad}
    kept = set(module.state_dict())
    aux |= {name: buffer for name, buffer in module.named_buffers() if name in kept}
    return params, aux


def copy_module(
    module: torch.nn.Module, given: Mapping[str, Array], device: Device, where: torch.device
) -> torch.nn.Module:
    """A copy on ``where`` that shares nothing with ``module``; its tensors of the given names use those arrays' memory.

    Raises:
        ShapeMismatch, DtypeMismatch: a given array does not fit.
    """
    memo: dict[int, Any] = {}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, array in given.items():
        if name in tensors:
            original = tensors[name]
            check_fits("params", name, array, tuple(original.shape), dtype_name(original.dtype))
            own = as_tensor(array, device)
            if isinstance(original, torch.nn.Parameter):
                own = torch.nn.Parameter(own, requires_grad=original.requires_grad)
            memo[id(original)] = own
    copied = copy.deepcopy(module, memo)
    return copied.to(where)


def restore_states(module: torch.nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    """Make these tensors the states of the module again, with the current values.

    A module may replace a buffer by a new tensor instead of writing into it; the executor's arrays must stay the same.
    """
    for name, state in states.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        current = getattr(owner, leaf)
        if current is not state:
            with torch.no_grad():
                state.copy_(current)
            setattr(owner, leaf, state)

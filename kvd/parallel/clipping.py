"""Keeping the gradients of a worker within a norm before they are pushed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvd.compute.merge import accumulator_dtype, is_integer
from kvd.compute.norms import norm
from kvd.compute.quiet import quietly
from kvd.compute.tensors import as_array, dtype_name, is_cupy, is_torch, writable_view, write_back
from kvd.errors import ConfigError, DtypeMismatch, NotAllowed
from kvd.optimizer.fields import number, shown


def clip_by_global_norm(gradients: Mapping[Any, Any] | Iterable[Any], max_norm: float) -> float:
    """Make gradients shorter, in place and all by one factor, if their common norm is greater than ``max_norm``.

    The norm is that of all elements of all arrays, √(Σ x²), in float64. For gradients that a program pushes itself::

        loss.backward()
        clip_by_global_norm([parameter.grad for parameter in module.parameters()], 1.0)
        kv.push(names, [parameter.grad for parameter in module.parameters()])

    Each worker clips its own: that is not the norm of the merged gradient. A group that is bound to a store sends
    gradients while the backward pass still runs, before the norm is known; there, and on the servers,
    ``clip_gradient`` of the optimizer clips element by element.

    Arguments:
        gradients: arrays that can be written to, NumPy, torch or CuPy, of float dtypes; or a mapping to such. None in
            the place of one, as of a parameter that took no part, is left out.
        max_norm: > 0.

    Returns:
        The norm before. If it is infinite or NaN, no gradient was changed: leave such a step out, or lower the rate.

    Raises:
        ConfigError: ``max_norm`` is no number > 0.
        DtypeMismatch: an array has another dtype. No gradient was changed then, nor with the next.
        NotAllowed: one cannot be written to, as those of JAX: pass copies, ``np.array(gradient)``.
    """
    limit = number("max_norm", max_norm)
    if limit <= 0:
        raise ConfigError(f"max_norm must be > 0, not {shown(max_norm)}", setting="max_norm")
    pairs = gradients.items() if isinstance(gradients, Mapping) else enumerate(gradients)
    named = {name: gradient for name, gradient in pairs if gradient is not None}
    hosts = {name: _host(name, gradient) for name, gradient in named.items()}
    norms = [quietly(norm, host.reshape(-1)) for host in hosts.values()]
    total = math.sqrt(sum([each * each for each in norms]))
    if not limit < total < math.inf:
        return total
    for name, host in hosts.items():
        wide = accumulator_dtype(host.dtype)
        shorter = host.astype(wide) * np.asarray(limit / total, wide)
        write_back(named[name], shorter.astype(host.dtype, copy=False))
    return total


def _host(name: object, gradient: object) -> np.ndarray[Any, Any]:
    host = as_array(gradient)
    if is_integer(host.dtype):
        raise DtypeMismatch(f"gradient {shown(name)} is {dtype_name(host.dtype)}, it must be of a float dtype")
    if writable_view(gradient) is None and not (is_torch(gradient) or is_cupy(gradient)):
        kind = type(gradient).__name__
        if isinstance(gradient, (float, np.generic)):  # also what an array of one dimension gives one by one
            raise NotAllowed(f"gradient {shown(name)} is a single {kind}: pass a list of arrays")
        raise NotAllowed(
            f"gradient {shown(name)}, of type {kind}, cannot be written to: pass a copy, np.array(gradient)"
        )
    return host

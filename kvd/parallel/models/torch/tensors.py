"""torch's tensors and arrays of a device, over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from kvd.errors import ConfigError
from kvd.parallel.batch import BFLOAT16
from kvd.parallel.device import Array, Device, HostArray
from kvd.parallel.models.outputs import named_outputs


def torch_device(device: Device) -> torch.device:
    """The torch device for ours.

    Raises:
        ConfigError: it is a CUDA device, and torch finds none of this number.
    """
    if not device.is_cuda:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if device.index >= count:
        there = ", ".join(["cpu"] + [f"cuda:{index}" for index in range(count)])
        raise ConfigError(f"torch has no device {device}; it finds {there}", setting="devices")
    return torch.device("cuda", device.index)


def dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy dtype of a torch dtype. Raises ConfigError if NumPy has none."""
    if dtype == torch.bfloat16:
        return BFLOAT16
    try:
        known: np.dtype[Any] = np.dtype(dtype_name(dtype))
    except TypeError as error:
        raise ConfigError(f"{dtype} has no NumPy dtype", setting="module") from error
    return known


def dtype_name(dtype: torch.dtype) -> str:
    """What NumPy, or ml_dtypes, calls this dtype."""
    return str(dtype).removeprefix("torch.")


def torch_stream(stream: Any, device: Device) -> torch.cuda.Stream:
    """torch's handle of a stream of CuPy."""
    return torch.cuda.ExternalStream(stream.ptr, device=device.index)  # type: ignore[no-untyped-call]


def as_device_array(tensor: torch.Tensor, device: Device) -> Array:
    """An array of ``device`` over the memory of ``tensor``, which is on that device."""
    plain = tensor.detach()
    if device.is_cuda:
        return device.xp.from_dlpack(plain)
    if plain.dtype == torch.bfloat16:  # unknown to NumPy itself: passed on as bits
        return plain.view(torch.int16).numpy().view(BFLOAT16)
    return plain.numpy()


def as_tensor(array: Array, device: Device) -> torch.Tensor:
    """A tensor over the memory of an array of ``device``."""
    if device.is_cuda:
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
        return tensor
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def host_copy(tensor: torch.Tensor) -> HostArray:
    """A copy in host memory."""
    array: HostArray = as_device_array(tensor.detach().cpu().clone(), Device("cpu"))
    return array


def outputs_of(returned: Any) -> dict[str, torch.Tensor]:
    """Name → tensor of what a module returned.

    Raises:
        ConfigError: it is neither a tensor nor a tuple, list or dict of tensors.
    """
    named = named_outputs(returned)
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"the module's {name} is a {type(tensor).__name__}, not a tensor", setting="module")
    return named

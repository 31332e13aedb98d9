"""Conversion of users' arrays (NumPy, torch, JAX, CuPy, buffers, numbers) to host arrays and back.

torch, CuPy and JAX are never imported here: a value can only belong to one of them if the user's program has imported
it, so a look into ``sys.modules`` is enough.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from kvd.errors import DtypeMismatch, KvdError, NotAllowed, ShapeMismatch

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": BFLOAT16,
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}
"""The dtypes that a key may have, by the name that they have in messages, files and on the command line."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# DLPack's numbers for the devices whose memory the CPU can read: kDLCPU, kDLCUDAHost, kDLROCMHost.
_HOST_DEVICES = (1, 3, 11)


def dtype_name(dtype: object) -> str:
    """Return the name of a NumPy dtype, such as ``"bfloat16"``.

    Raises:
        DtypeMismatch: no key can have this dtype; the message lists those that it can.
    """
    resolved = np.dtype(dtype)  # type: ignore[call-overload]
    name = _NAMES.get(resolved)
    if name is None:
        raise DtypeMismatch(f"the dtype {resolved} is not supported; supported are {', '.join(DTYPES)}")
    return name


def named_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name; the inverse of ``dtype_name``.

    Raises:
        DtypeMismatch: there is no such name; the message lists those that there are.
    """
    if name not in DTYPES:
        raise DtypeMismatch(f"the dtype {name!r:.40} is not supported; supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def as_array(value: object) -> np.ndarray[Any, Any]:
    """Return ``value`` as a host array of the same shape, sharing its memory wherever that is possible.

    Args:
        value: a NumPy array or scalar, a torch tensor (also one that requires a gradient), a JAX or CuPy array, any
            object with the buffer protocol, DLPack or ``__array__``, a number, or nested lists of numbers.

    Returns:
        A view for memory that the CPU can read, of any strides, possibly read-only. A copy from a GPU, from numbers
        and lists, and of arrays in foreign byte order. Python floats become float32, Python ints int64.

    Raises:
        DtypeMismatch: the elements have a dtype that no key can have.
        ShapeMismatch: nested lists of unequal lengths.
        NotAllowed: the value is nothing of the above, is masked, or cannot be read, such as memory on a device that
            nothing loaded here can read.
    """
    array = _readable(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    dtype_name(array.dtype)
    return array


def writable_view(target: object) -> np.ndarray[Any, Any] | None:
    """Return a host array that shares the memory of ``target`` and may be written to, else None.

    None for memory on a GPU, read-only and immutable values (JAX), numbers and lists.

    Raises:
        DtypeMismatch: the elements have a dtype that no key can have.
    """
    if type(target) is np.ndarray and target.dtype.isnative:  # by far the most common: no need to ask what else it is
        dtype_name(target.dtype)
        return target if target.flags.writeable else None
    if isinstance(target, np.generic | int | float | list | tuple) or _is_jax(target) or _is_cupy(target):
        return None
    try:
        if _is_torch(target) and not _is_plain_memory(_tensor(target)):
            return None
        array = _readable(target)
    except NotAllowed:
        return None
    dtype_name(array.dtype)
    return array if array.flags.writeable and _shares_memory(target) else None


def write_back(target: object, source: np.ndarray[Any, Any]) -> None:
    """Write the elements of ``source`` into ``target`` in place.

    Args:
        target: an array of the user: NumPy, torch or CuPy, on any device and of any strides, or a writable buffer.
        source: a host array of the same shape and dtype.

    Raises:
        ShapeMismatch: the shapes differ.
        DtypeMismatch: the dtypes differ: nothing is cast in silence.
        NotAllowed: the target cannot be written to.
    """
    view = writable_view(target)
    if view is not None:
        _check_equal(view.shape, dtype_name(view.dtype), source)
        np.copyto(view, source)
    elif _is_torch(target):
        _write_torch(_tensor(target), source)
    elif _is_cupy(target):
        _write_cupy(target, source)
    else:
        text = f"out is {kind_of_read_only(target)}"
        raise NotAllowed(f"{text}: pass an array that can be written to, or out=None for a new one")


def kind_of_read_only(target: object) -> str:
    """Return what ``target`` is, in words, for an error that says that it cannot be written to."""
    return "a JAX array, which is immutable" if _is_jax(target) else f"a {type(target).__name__} that is read-only"


def contiguous_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of an array in C order, shape (nbytes,), uint8: a view if it is C-contiguous, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def is_torch(value: object) -> bool:
    """Return whether ``value`` is a torch tensor on any device."""
    return _is_torch(value)


def is_cupy(value: object) -> bool:
    """Return whether ``value`` is a CuPy array."""
    return _is_cupy(value)


def is_parameter(value: object) -> bool:
    """Return whether ``value`` is a parameter of a torch module."""
    return _belongs_to(value, "torch.nn", "Parameter")


def has_address(tensor: Any) -> bool:
    """Return whether the memory of a torch tensor has a plain address, unlike that of some accelerators."""
    return tensor.device.type in ("cpu", "cuda")


def elements_at(value: Any) -> tuple[Any, ...] | None:
    """Return where the elements of a dense torch tensor lie: equal for tensors that have the same elements. None for
    a tensor without elements or without a plain address, and for any other value."""
    if not _is_torch(value) or value.layout != sys.modules["torch"].strided or value.numel() == 0:
        return None
    if not has_address(value):
        return None
    return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride()


def check_unmasked(value: object) -> None:
    """Raise NotAllowed if ``value`` is a masked array of NumPy: its elements mean nothing without the mask."""
    if _belongs_to(value, "numpy.ma", "MaskedArray"):
        raise NotAllowed(
            "a masked array would lose its mask: pass array.filled(0), with a number of your choice, or array.data if "
            "the mask does not matter"
        )


def _readable(value: object) -> np.ndarray[Any, Any]:
    """Return the array of ``_host_array``. Errors of other libraries become NotAllowed."""
    try:
        return _host_array(value)
    except (KvdError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        kind = f"a torch {type(value).__name__}" if _is_torch(value) else f"a {type(value).__name__}"
        raise NotAllowed(f"{kind} cannot be read as an array ({reason:.200})") from error


def _host_array(value: object) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray | np.generic):
        if type(value) is not np.ndarray:
            check_unmasked(value)
        return np.asarray(value)
    if isinstance(value, bool | int | float | list | tuple):
        return _from_numbers(value)
    if _is_torch(value):
        return _from_torch(_tensor(value))
    if _is_cupy(value):
        return np.asarray(sys.modules["cupy"].asnumpy(value))
    for read in (_from_buffer, _from_dlpack, _from_protocol):
        array = read(value)
        if array is not None:
            return array
    kind = "None" if value is None else f"a {type(value).__name__}"
    hint = " (the gradient of a parameter that took no part in the loss is None)" if value is None else ""
    raise NotAllowed(
        f"{kind} is no array{hint}: pass something with DLPack or the buffer protocol, such as a NumPy, "
        "torch, JAX or CuPy array; memory on a GPU that is none of these has to be copied to the host first"
    )


def _from_numbers(value: object) -> np.ndarray[Any, Any]:
    if isinstance(value, list | tuple):
        _check_all_unmasked(value)
    try:
        array = np.asarray(value)
    except TypeError as error:
        raise DtypeMismatch(f"the list holds something that is no number: {error}") from error
    except ValueError as error:
        raise ShapeMismatch(f"the nested lists have unequal lengths: {error}") from error
    # A float in a program means "a number", not "64 bits": unlike np.float64, which somebody chose.
    if array.dtype == np.float64 and _only_python_numbers(value):
        return array.astype(np.float32)
    return array


def _check_all_unmasked(values: list[Any] | tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _check_all_unmasked(value)
        else:
            check_unmasked(value)


def _only_python_numbers(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_only_python_numbers, value))
    return type(value) in (float, int, bool)


def _from_buffer(value: object) -> np.ndarray[Any, Any] | None:
    try:
        return np.asarray(memoryview(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        return None


def _from_dlpack(value: Any) -> np.ndarray[Any, Any] | None:
    if not (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        return None
    if value.__dlpack_device__()[0] not in _HOST_DEVICES:
        cupy = sys.modules.get("cupy")
        return None if cupy is None else np.asarray(cupy.asnumpy(cupy.from_dlpack(value)))
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):  # bfloat16 and the like, which NumPy's DLPack does not know
        return None


def _from_protocol(value: Any) -> np.ndarray[Any, Any] | None:
    return np.asarray(value) if hasattr(value, "__array__") else None


def _shares_memory(target: object) -> bool:
    """Return whether writing to ``_host_array(target)`` writes to the target, unlike for a mere ``__array__``."""
    if isinstance(target, np.ndarray) or _is_torch(target):
        return True
    return _from_buffer(target) is not None or _from_dlpack(target) is not None


def _is_torch(value: object) -> bool:
    return _belongs_to(value, "torch", "Tensor")


def _is_cupy(value: object) -> bool:
    return _belongs_to(value, "cupy", "ndarray")


def _is_jax(value: object) -> bool:
    return _belongs_to(value, "jax", "Array")


def _belongs_to(value: object, package: str, class_name: str) -> bool:
    cls = getattr(sys.modules.get(package), class_name, None)
    return isinstance(cls, type) and isinstance(value, cls)


def _tensor(value: object) -> Any:
    """Cast a value to a tensor for the type checker, without importing torch."""
    return value


def _is_plain_memory(tensor: Any) -> bool:
    """Return whether a tensor's memory holds its elements: on the host, without a pending negation.

    Raises NotAllowed if its elements have no memory yet.
    """
    _check_initialized(tensor)
    return tensor.device.type == "cpu" and not tensor.is_neg() and not tensor.is_conj()


def _check_initialized(tensor: Any) -> None:
    if sys.modules["torch"].nn.parameter.is_lazy(tensor):
        raise NotAllowed(
            f"a torch {type(tensor).__name__} of a lazy module has no shape yet: call the module once on a batch, then "
            "init, push and pull its parameters"
        )


def _check_dense(tensor: Any) -> None:
    _check_initialized(tensor)
    if tensor.is_nested:
        raise NotAllowed("a nested torch tensor is no dense array: pass its parts under keys of their own, or padded")
    if tensor.layout != sys.modules["torch"].strided:
        raise NotAllowed(f"a torch tensor of layout {tensor.layout} is no dense array: pass tensor.to_dense()")


def _from_torch(tensor: Any) -> np.ndarray[Any, Any]:
    torch = sys.modules["torch"]
    _check_dense(tensor)
    if tensor.device.type == "meta":
        raise NotAllowed("a torch tensor on the device meta has no elements: give it memory, with module.to_empty()")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.dtype == torch.bfloat16:  # unknown to NumPy itself: taken over as bits
        return np.asarray(plain.view(torch.int16).numpy()).view(BFLOAT16)
    try:
        return np.asarray(plain.numpy())
    except TypeError as error:
        raise DtypeMismatch(f"the dtype {plain.dtype} is not supported; supported are {', '.join(DTYPES)}") from error


def _write_torch(tensor: Any, source: np.ndarray[Any, Any]) -> None:
    """Copy into a tensor whose memory cannot be written from here, such as one on a GPU."""
    torch = sys.modules["torch"]
    _check_dense(tensor)
    _check_equal(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), source)
    # torch wants writable memory without negative strides.
    flat = np.require(source, requirements=["C", "W"])
    if flat.dtype == BFLOAT16:
        staged = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    else:
        staged = torch.from_numpy(flat)
    tensor.detach().copy_(staged.reshape(tensor.shape))


def _write_cupy(array: Any, source: np.ndarray[Any, Any]) -> None:
    _check_equal(tuple(array.shape), dtype_name(array.dtype), source)
    with array.device:
        array[...] = sys.modules["cupy"].asarray(source)


def _check_equal(shape: tuple[int, ...], dtype: str, source: np.ndarray[Any, Any]) -> None:
    if shape != source.shape:
        raise ShapeMismatch(f"out has the shape {shape}, the value has {source.shape}")
    if dtype != dtype_name(source.dtype):
        raise DtypeMismatch(f"out has the dtype {dtype}, the value has {dtype_name(source.dtype)}")

"""Memory that a compiled loop will need soon, for numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

cgutils: Any = _cgutils
_intrinsic: Any = intrinsic


def _prefetching(context: Any, array: Any, number: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0])
        stride = cgutils.unpack_tuple(builder, data.strides)[0]
        start = builder.add(builder.ptrtoint(data.data, stride.type), builder.mul(arguments[1], stride))
        pointer = builder.inttoptr(builder.add(start, arguments[2]), cgutils.voidptr_t)
        flags = [cgutils.int32_t(flag) for flag in (0, 3, 1)]  # to be read, to be kept near, data
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[cgutils.int32_t] * 3])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


prefetch: Any = _intrinsic(_prefetching)
"""``prefetch(array, number, offset)``: have the processor fetch the line of 64 bytes that holds the byte ``offset``
behind the beginning of ``array[number]``. It changes nothing."""

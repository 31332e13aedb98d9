"""Compilation of loops by numba, if installed, once there is enough work for them.

The loops of :mod:`kvd.compute.jit` give the bits of the NumPy kernels, several times faster, so it does not matter when
one takes the place of the other. Importing numba and compiling a loop take seconds, and no update waits for it: NumPy
calculates until a loop has been asked for often enough (``ENOUGH``), then a thread compiles it, and NumPy goes on until
it is ready. If numba is missing, or anything fails, NumPy calculates for good, and ``kernels_in_use`` says why.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from kvd.compute.catalogue import kernel_of
from kvd.compute.kernels import ID_LOOPS, KEEPING, MERGE_LOOPS, ROW_LOOPS, ROWS, loop_name
from kvd.compute.tensors import BFLOAT16, dtype_name
from kvd.optimizer import Optimizer

Array: TypeAlias = np.ndarray[Any, Any]
Function: TypeAlias = Callable[..., Any]

ENOUGH = 2**26
"""Elements after which a loop is worth its compilation: NumPy takes some tenths of a second for them."""

_FLOAT32: np.dtype[Any] = np.dtype(np.float32)
_WORK_OF_ID, _WORK_OF_IDS = 32, 2**14  # what NumPy takes for an id, and for a call, in elements
_CALL = 2**12  # what a call costs beside its elements, in elements

BITS: dict[np.dtype[Any], np.dtype[Any]] = {np.dtype(np.float16): np.dtype(np.int16), BFLOAT16: np.dtype(np.uint16)}
"""The dtypes as which the loops take the halves, which numba does not know: their bits."""

_INT64: np.dtype[Any] = np.dtype(np.int64)
_MISSING = "numba is not installed (pip install numba)"

_log = logging.getLogger(__name__)


class Loop:
    """One loop for one combination of dtypes, which may be there or not.

    Attributes:
        key: its name, and the names of the dtypes of the contributions and the result.
    """

    __slots__ = ("_asked", "_function", "_work", "key")

    def __init__(self, name: str, source: str, target: str) -> None:
        self.key = (name, source, target)
        self._function: Function | None = None
        self._work = 0
        self._asked = False

    def ready(self, elements: int) -> Function | None:
        """Return the compiled loop for ``elements`` elements, or None if NumPy has to calculate this time."""
        if self._function is None and not self._asked:
            self._work += elements + _CALL
            if self._work >= ENOUGH:
                self._asked = True
                _compiler.ask(self)
        return self._function

    def use(self, function: Function) -> None:
        """Calculate with ``function`` from now on."""
        self._asked = True
        self._function = function

    @property
    def is_ready(self) -> bool:
        """Return whether the loop is compiled."""
        return self._function is not None


class _Compiler:
    """Queue of loops to compile, with a thread that ends when the queue is empty.

    The thread is no daemon: LLVM must not be at work while the interpreter shuts down. At the end of the
    program the thread finishes its current loop, and starts no other.
    """

    def __init__(self) -> None:
        self.failure = ""  # why there will be no compiled loops any more
        self._jit: ModuleType | None = None
        self._waiting: deque[Loop] = deque()
        self._running = False
        self._queue_lock = threading.Lock()
        self._compile_lock = threading.Lock()

    def ask(self, loop: Loop) -> None:
        """Compile ``loop`` soon."""
        with self._queue_lock:
            self._waiting.append(loop)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="kvd-compile").start()

    def compile(self, loop: Loop) -> None:
        """Compile ``loop`` now, unless it is there or cannot be."""
        with self._compile_lock:
            if loop.is_ready or self.failure:
                return
            try:
                jit = self._module()
                if jit is not None:
                    loop.use(jit.compile_loop(*loop.key))
            except Exception as error:  # noqa: BLE001 - importing and compiling raise all sorts of things
                self.failure = f"numba failed: {type(error).__name__}: {error}".split("\n")[0][:200]
                _log.warning("merges and updates are calculated by NumPy: %s", self.failure)

    def _module(self) -> ModuleType | None:
        """Import what needs numba; None, with the reason in ``failure``, if it is not to be used."""
        if self._jit is None:
            if find_spec("numba") is None:
                self.failure = _MISSING
                return None
            from kvd.compute import jit

            if jit.DISABLED:
                self.failure = "NUMBA_DISABLE_JIT is set"
                return None
            self._jit = jit
        return self._jit

    def _run(self) -> None:
        while True:
            with self._queue_lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    self._running = False
                    return
                loop = self._waiting.popleft()
            self.compile(loop)


_compiler = _Compiler()
_loops: dict[tuple[str, np.dtype[Any], np.dtype[Any]], Loop] = {}


def loop_for(name: str, source: np.dtype[Any], target: np.dtype[Any]) -> Loop:
    """Return the loop called ``name`` for contributions of ``source`` and a result of ``target``."""
    key = (name, source, target)
    loop = _loops.get(key)
    if loop is None:
        loop = _loops.setdefault(key, Loop(name, dtype_name(source), dtype_name(target)))
    return loop


def id_loop(name: str, count: int) -> Function | None:
    """Return the loop of `ID_LOOPS` for so many row ids, or None if NumPy has to calculate this time."""
    return loop_for(name, _INT64, _INT64).ready(count * _WORK_OF_ID + _WORK_OF_IDS)


def warm_up(
    optimizer: Optimizer | None, dtype: object = np.float32, *, keeps_merged: bool = False, of_rows: bool = False
) -> bool:
    """Compile now what updates of ``dtype`` will need, and wait for it: for tests and measurements.

    Args:
        optimizer: the rule, or None for a merge alone.
        dtype: a dtype that NumPy or ml_dtypes knows.
        keeps_merged: for updates that keep the merged gradient, too.
        of_rows: for tables, too: the loops on row ids, for merged rows, and for updates of rows if there is one.

    Returns:
        Whether compiled loops will be used; if not, ``kernels_in_use`` says why.
    """
    target: np.dtype[Any] = np.dtype(dtype)  # type: ignore[call-overload]
    if target.kind in "iu":
        return False
    name = "merge" if optimizer is None else loop_name(kernel_of(optimizer))
    if name is None:
        return False
    wanted = [loop_for(name, target, target)]
    if name != "merge" and target.itemsize == 2:
        wanted.append(loop_for(name, np.dtype(np.float32), target))
    if keeps_merged:
        wanted.append(loop_for(name + KEEPING, target, target))
    if of_rows:
        wanted += [loop_for(each, _INT64, _INT64) for each in ID_LOOPS]
        wanted += [loop_for(each, target, target) for each in MERGE_LOOPS]
        wanted += [loop_for(name + ROWS, target, target)] if name in ROW_LOOPS else []
    for loop in wanted:
        _compiler.compile(loop)
    return all(loop.is_ready for loop in wanted)


def warm_up_codecs() -> bool:
    """Compile the loops of compressors now, and wait for it."""
    loops = [codec_loop(name) for name in ("magnitudes", "two_bit")]
    for loop in loops:
        _compiler.compile(loop)
    return all(loop.is_ready for loop in loops)


def codec_loop(name: str) -> Loop:
    """Return the loop of compressors that is called ``name``."""
    return loop_for(name, _FLOAT32, _FLOAT32)


def kernels_in_use() -> str:
    """Say in words what calculates merges and updates in this process, and why."""
    if _compiler.failure:
        return f"NumPy: {_compiler.failure}"
    ready = sorted(f"{loop.key[0]} {loop.key[-1]}" for loop in list(_loops.values()) if loop.is_ready)
    if ready:
        return f"numba: {', '.join(dict.fromkeys(ready))}; NumPy for the rest"
    if find_spec("numba") is None:
        return f"NumPy: {_MISSING}"
    return "NumPy: until there is enough to calculate for numba"


def as_bits(array: Array, bits: np.dtype[Any] | None) -> Array:
    """Return ``array`` as a loop takes it: halves as their bits."""
    return array if bits is None else array.view(bits)


def are_contiguous(*groups: Sequence[Array]) -> bool:
    """Return whether the elements of every array are contiguous, as the loops require."""
    for group in groups:  # no any() and all(): this is on the way of every small update
        for array in group:
            if not array.flags.c_contiguous:
                return False
    return True

"""When loops are compiled, when they are used, and NumPy wherever there is no loop."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.compute import compiled
from kvd.compute.compiled import Loop, kernels_in_use, loop_for, warm_up
from kvd.compute.kernels import SGDKernel, loop_name
from kvd.compute.tensors import DTYPES
from kvd.optimizer import SGD
from kvd.testing.cluster import wait_until
from tests.compute.compiled_harness import needs_numba


@needs_numba
def test_no_update_waits_for_a_compilation() -> None:
    loop = Loop("adagrad", "float64", "float64")
    assert loop.ready(compiled.ENOUGH - 2 * compiled.ENOUGH // 3) is None
    assert not loop._asked
    started = threading.Event()
    original = compiled._compiler.compile

    def compile_slowly(wanted: Loop) -> None:
        started.wait(60)
        original(wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled._compiler, "compile", compile_slowly)
        assert loop.ready(compiled.ENOUGH) is None, "the loop cannot be there while its compilation waits"
        assert loop._asked
        started.set()
        wait_until(lambda: loop.ready(1) is not None, "the loop is compiled", 100.0)
    assert loop.is_ready


def test_a_failure_leaves_numpy_and_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        DISABLED = False

        @staticmethod
        def compile_loop(*key: str) -> None:
            raise OSError("no LLVM\nfor this machine")

    compiler = compiled._Compiler()
    compiler._jit = Broken  # type: ignore[assignment]
    monkeypatch.setattr(compiled, "_compiler", compiler)
    monkeypatch.setattr(compiled, "_loops", {})
    assert not warm_up(None, np.float16)
    assert not warm_up(None, np.float64)
    assert "no LLVM" in kernels_in_use()
    assert len(caplog.records) == 1
    loop = loop_for("merge", DTYPES["float16"], DTYPES["float16"])
    assert loop.ready(2 * compiled.ENOUGH) is None


def in_a_new_process(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


UPDATE = """
import numpy as np
from kvd.compute.compiled import kernels_in_use, warm_up
from kvd.compute.optimizers import SliceState, apply_update
from kvd.optimizer import SGD
print(warm_up(SGD(1.0)))
out, one = np.empty(3, np.float32), np.ones(3, np.float32)
apply_update(SGD(1.0), SliceState(), 5 * one, [one, one], out, "sum")
print(out.tolist(), kernels_in_use())
"""


def test_without_numba_numpy_calculates() -> None:
    answer = in_a_new_process("import sys; sys.modules['numba'] = None\n" + UPDATE)
    assert answer.startswith("False\n[3.0, 3.0, 3.0] NumPy: ")
    assert "numba" in answer


def test_before_it_is_needed_numba_is_not_even_imported() -> None:
    program = UPDATE.replace("print(warm_up(SGD(1.0)))", "import sys") + "print('numba' in sys.modules)"
    assert in_a_new_process(program).endswith("False")


@needs_numba
def test_numba_that_is_told_to_compile_nothing_is_not_used() -> None:
    answer = in_a_new_process(UPDATE, NUMBA_DISABLE_JIT="1")
    assert answer.startswith("False\n[3.0, 3.0, 3.0] NumPy: ")
    assert "NUMBA_DISABLE_JIT" in answer


@needs_numba
def test_a_cache_that_was_damaged_is_no_obstacle(tmp_path: Path) -> None:
    expected = "True\n[3.0, 3.0, 3.0] numba: sgd float32; NumPy for the rest"
    assert in_a_new_process(UPDATE, NUMBA_CACHE_DIR=str(tmp_path)) == expected
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files, "nothing was written to the cache"
    for path in files:
        path.write_bytes(b"garbage")
    assert in_a_new_process(UPDATE, NUMBA_CACHE_DIR=str(tmp_path)) == expected


@needs_numba
def test_where_no_cache_can_be_written_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvd.compute import jit

    asked = []
    original = jit._njit

    def without_a_place(*, cache: bool, **options: Any) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(**options)

    monkeypatch.setattr(jit, "_njit", without_a_place)
    function = jit.compile_loop("merge", "float32", "float32")
    assert asked == [True, False]
    one, out = np.ones(3, np.float32), np.empty(3, np.float32)
    function(one, one, True, out, np.array([1, 1, 4, 1, 0, 0, 0], np.float32), True)
    assert out.tolist() == [0.5] * 3


def test_a_kernel_derived_from_a_built_in_one_is_not_replaced() -> None:
    class Derived(SGDKernel):
        __slots__ = ()

    assert loop_name(SGDKernel(SGD(0.1))) == "sgd"
    assert loop_name(Derived(SGD(0.1))) is None
    assert not warm_up(SGD(0.1), np.int32)

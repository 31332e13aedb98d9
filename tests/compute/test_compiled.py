"""Compiled loops: the very bits of the NumPy kernels, and NumPy wherever there is no loop."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.compute import compiled
from kvd.compute.compiled import Loop, kernels_in_use, loop_for, warm_up
from kvd.compute.kernels import SGDKernel, loop_name
from kvd.compute.merge import TILE, merge
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.quiet import quietly
from kvd.compute.scratch import Scratch
from kvd.compute.tensors import BFLOAT16, DTYPES
from kvd.optimizer import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, schedule

Array = np.ndarray[Any, Any]

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")

FLOATS = ["float16", "bfloat16", "float32", "float64"]

RULES: list[Optimizer] = [
    SGD(0.1),
    SGD(0.1, wd=0.05, rescale_grad=0.3, clip_gradient=0.7),
    SGD(0.1, momentum=0.9),
    SGD(0.05, momentum=0.9, wd=1e-60, rescale_grad=0.25, clip_gradient=1e-60),
    SGD(0.05, momentum=0.8, nesterov=True, wd=0.01),
    Adam(schedule.Warmup(schedule.Cosine(0.2, 20), 5)),
    Adam(0.01, beta1=0.5, beta2=0.9, epsilon=0.0, wd=0.1, rescale_grad=2.0, clip_gradient=1.0),
    AdamW(0.05, wd=0.3, clip_gradient=1e300),
    Adagrad(0.1, lr_decay=0.05, wd=0.02, epsilon=0.0),
    RMSProp(0.01, wd=0.01),
    RMSProp(0.01, alpha=0.9, momentum=0.9),
    RMSProp(0.01, alpha=0.9, centered=True, epsilon=0.0),
    RMSProp(0.01, alpha=0.8, centered=True, momentum=0.5, epsilon=1e-2, rescale_grad=0.5, clip_gradient=0.4),
]


@contextmanager
def only_numpy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "ready", lambda self, elements: None)
        yield


@contextmanager
def only_compiled() -> Iterator[list[str]]:
    """Let nothing but compiled loops calculate; gives the list of the names of those that were used."""
    used: list[str] = []
    found = Loop.ready

    def ready(loop: Loop, elements: int) -> Callable[..., None]:
        function = found(loop, elements)
        assert function is not None, f"{loop.key} was not warmed up"
        used.append(loop.key[0])
        return function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "ready", ready)
        yield used


def numbers(random: np.random.Generator, size: int, dtype: str) -> Array:
    """Numbers of all magnitudes, with everything that is special among them; two in three are ordinary."""
    kind = DTYPES[dtype]
    ordinary = random.normal(size=size)
    limits = np.array([65504.0, 2.0**-24, 2.0**-14, 3e38, 1e-45, 1.2e-38, 1e308, 5e-324])
    special = np.concatenate([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], limits, -limits])
    scaled = ordinary * 10.0 ** random.integers(-45, 39, size)
    choice = random.integers(0, 6, size)
    with np.errstate(all="ignore"):
        return np.select([choice == 0, choice == 1], [random.choice(special, size), scaled], ordinary).astype(kind)


def assert_same_bits(left: Array, right: Array, what: str) -> None:
    """Equal bits, except that every NaN equals every other: which payload survives is nobody's promise."""
    assert left.dtype == right.dtype, what
    with np.errstate(all="ignore"):
        both_nan = np.isnan(left.astype(np.float64)) & np.isnan(right.astype(np.float64))
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[left.dtype.itemsize]
    wrong = np.flatnonzero((left.view(bits) != right.view(bits)) & ~both_nan)
    assert wrong.size == 0, f"{what}: {wrong.size} differ, the first at {wrong[0]}: {left[wrong[0]]} {right[wrong[0]]}"


def updates(rule: Optimizer | None, dtype: str, size: int, count: int, mode: Any, steps: int) -> dict[str, Array]:
    """The weights and the state after some updates, and every version in between."""
    random = np.random.default_rng([size, count, steps])
    state, current = SliceState(), numbers(random, size, dtype)
    found = {"step 0": current}
    samples = [*random.integers(0, 4, count - 1).tolist(), 3]
    for step in range(1, steps + 1):
        contributions = [numbers(random, size, dtype) for _ in range(count)]
        for array in contributions:
            array.flags.writeable = False
        out = np.empty_like(current)
        apply_update(rule, state, current, contributions, out, mode, samples)
        found[f"step {step}"] = current = out
    exported = state.export()
    assert int(exported.pop("step")) == (0 if rule is None else steps)
    return found | exported


def assert_both_agree(rule: Optimizer | None, dtype: str, size: int, count: int, mode: Any, steps: int = 3) -> None:
    with only_numpy():
        expected = updates(rule, dtype, size, count, mode, steps)
    with only_compiled() as used:
        result = updates(rule, dtype, size, count, mode, steps)
    assert rule is None or len(used) == steps
    assert expected.keys() == result.keys()
    for name, array in expected.items():
        assert_same_bits(array, result[name], f"{rule} {dtype} {size} {count} {mode}, {name}")


@needs_numba
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_optimizer_has_the_bits_of_its_numpy_kernel(rule: Optimizer, dtype: str) -> None:
    assert warm_up(rule, DTYPES[dtype]), kernels_in_use()
    for count in (1, 2, 3, 5):
        for mode in ("sum", "mean", "weighted"):
            assert_both_agree(rule, dtype, 500, count, mode)
        for size in (0, 1, 7):
            assert_both_agree(rule, dtype, size, count, "weighted")


@needs_numba
@pytest.mark.parametrize("size", [TILE - 1, TILE, TILE + 1, 3 * TILE])
@pytest.mark.parametrize(("rule", "dtype"), [(SGD(0.1, 0.9), "float32"), (Adam(), "bfloat16"), (Adam(), "float64")])
def test_tiles_do_not_show(rule: Optimizer, dtype: str, size: int) -> None:
    assert warm_up(rule, DTYPES[dtype]), kernels_in_use()
    for count in (1, 2, 3):
        assert_both_agree(rule, dtype, size, count, "weighted", steps=2)


@needs_numba
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_a_merge_has_the_bits_of_numpy(dtype: str, mode: Any) -> None:
    assert warm_up(None, DTYPES[dtype]), kernels_in_use()
    for size in (0, 1, 7, TILE - 1, TILE, TILE + 1, 3 * TILE):
        for count in (1, 2, 3, 5):
            assert_both_agree(None, dtype, size, count, mode, steps=1)
    with only_compiled() as used:
        updates(None, dtype, 7, 2, mode, 1)
    assert used == (["merge"] if mode != "sum" or dtype in ("float16", "bfloat16") else [])


@needs_numba
def test_nothing_is_contracted_to_a_fused_multiply_add() -> None:
    # x·x = 1 + 2⁻¹¹ + 2⁻²⁴ is rounded to 1 + 2⁻¹¹ by a multiplication, and not at all by a fused one.
    x = 1 + 2.0**-12
    rule = SGD(x, momentum=0.5)
    assert warm_up(rule)
    out = np.empty(64, np.float32)
    with only_compiled():
        apply_update(
            rule, SliceState(), np.full(64, 1 + 2.0**-11, np.float32), [np.full(64, x, np.float32)], out, "sum"
        )
    assert not out.any()


@needs_numba
def test_every_half_is_widened_and_rounded_as_numpy_does_it() -> None:
    from kvd.compute import jit

    patterns = np.arange(2**16, dtype=np.uint16)
    pairs: list[tuple[Any, Any, Any, Any]] = [
        (np.dtype(np.float16), np.int16, jit.wide_float16, jit.narrow_float16),
        (BFLOAT16, np.uint16, jit.wide_bfloat16, jit.narrow_bfloat16),
    ]
    for dtype, bits, wide, narrow in pairs:
        halves = patterns.view(dtype)
        widened = np.array([wide(value) for value in patterns.view(bits)], np.float32)
        assert_same_bits(widened, halves.astype(np.float32), f"{dtype} widened")
        # Every half, what lies in the middle between two of them, and the float32 on either side of both.
        finite = widened[np.isfinite(widened)]
        ordered = np.unique(finite).astype(np.float64)
        spaced = np.concatenate([finite, ((ordered[:-1] + ordered[1:]) / 2).astype(np.float32)])
        infinity = np.float32(np.inf)
        values = np.concatenate([spaced, np.nextafter(spaced, infinity), np.nextafter(spaced, -infinity), widened])
        with np.errstate(all="ignore"):
            expected = values.astype(dtype)
        rounded = np.array([narrow(value) for value in values]).astype(np.uint16).view(dtype)
        assert_same_bits(rounded, expected, f"rounded to {dtype}")


@needs_numba
def test_a_nan_of_bfloat16_has_one_pattern_for_each_sign() -> None:
    from kvd.compute import jit

    patterns = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFC12345], np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = patterns.astype(BFLOAT16).view(np.uint16).tolist()
    assert [jit.narrow_bfloat16(value) for value in patterns] == expected == [0x7FC0, 0x7FC0, 0xFFC0, 0xFFC0]


@needs_numba
def test_memory_that_is_read_only_and_not_aligned_is_taken_and_strides_are_left_to_numpy() -> None:
    rule = SGD(0.5, momentum=0.5)
    assert warm_up(rule)
    frozen = np.frombuffer(b"\0" + np.arange(8, dtype=np.float32).tobytes(), np.float32, 8, 1)
    results = []
    for given in (frozen, np.arange(8, dtype=np.float32).repeat(2)[::2]):
        out = np.empty(8, np.float32)
        apply_update(rule, SliceState(), np.ones(8, np.float32), [given, given], out, "sum")
        results.append(out.tolist())
    assert results == [[1 - 0.5 * 2 * value for value in range(8)]] * 2
    backwards = np.empty(8, np.float32)[::-1]
    apply_update(rule, SliceState(), np.ones(8, np.float32), [frozen, frozen], backwards, "sum")
    assert backwards.tolist() == results[0]


@needs_numba
def test_nobody_waits_for_a_compilation() -> None:
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
        until = time.monotonic() + 100
        while loop.ready(1) is None and time.monotonic() < until:
            time.sleep(0.01)
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


# --- What small updates are made of ---------------------------------------------------------------------------------


def test_overflow_and_nan_pass_without_a_warning_and_without_a_trace() -> None:
    before = np.geterr()
    huge = np.full(3, 3e38, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rule in (None, SGD(1e300), Adam(1e300)):
            out = np.empty(3, np.float32)
            apply_update(rule, SliceState(), huge, [huge, huge], out, "sum")
            assert not np.isfinite(out).any()
        halves = np.empty(3, np.float16)
        merge([np.full(3, 60000, np.float16)] * 2, halves, "sum")
        with pytest.raises(RuntimeWarning):
            np.multiply(huge, huge)
    assert np.geterr() == before


def test_threads_calculate_quietly_side_by_side() -> None:
    seen: list[Any] = []
    barrier = threading.Barrier(3)

    def look() -> Any:
        barrier.wait(10)
        return np.geterr()

    threads = [threading.Thread(target=lambda: seen.append(quietly(look))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [dict.fromkeys(("divide", "over", "under", "invalid"), "ignore")] * 3


def sizes_of(arrays: Sequence[Scratch]) -> list[int]:
    return [scratch.gradient.size for scratch in arrays]


def test_scratch_is_shared_between_sizes_and_does_not_pile_up() -> None:
    dtype = np.dtype(np.complex64)  # which nothing else asks for
    large = Scratch.of_thread(dtype, 5000)
    small = [Scratch.of_thread(dtype, size) for size in range(300)]
    assert sizes_of(small) == list(range(300))
    assert all(np.shares_memory(scratch.first, large.first) for scratch in small if scratch.first.size)
    assert Scratch.of_thread(dtype, 7) is Scratch.of_thread(dtype, 7)
    larger = Scratch.of_thread(dtype, 6000)
    assert np.shares_memory(Scratch.of_thread(dtype, 5000).first, larger.first)
    assert not np.shares_memory(larger.first, large.first)


def test_rules_do_not_pile_up_and_are_never_mixed_up() -> None:
    from kvd.compute import optimizers

    one = np.ones(1, np.float32)
    for index in range(optimizers._MANY_RULES + 100):
        out = np.empty(1, np.float32)
        apply_update(SGD(float(index)), SliceState(), one, [one], out, "sum")
        assert out.tolist() == [1 - index]
    assert 0 < len(optimizers._rules) <= optimizers._MANY_RULES

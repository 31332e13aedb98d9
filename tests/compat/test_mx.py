"""MXNet's names, with a small array class that behaves as MXNet documents its NDArray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.compat import mx
from kvd.errors import KeyNotFound, NotAllowed, ShapeMismatch
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster


class NDArray:
    """What MXNet documents: ``shape``, ``dtype``, ``asnumpy()`` gives a copy, ``array[:] = value`` writes.

    It has neither the buffer protocol nor DLPack, nor is it a sequence for NumPy.
    """

    __array__ = None

    def __init__(self, values: Any, dtype: Any = np.float32) -> None:
        self._values = np.array(values, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape

    @property
    def dtype(self) -> type:
        return self._values.dtype.type  # a class of NumPy, not a dtype

    def asnumpy(self) -> np.ndarray[Any, Any]:
        return self._values.copy()

    def __setitem__(self, place: slice, value: Any) -> None:
        assert place == slice(None)
        self._values[:] = value


def full(value: float, dtype: Any = np.float32) -> NDArray:
    return NDArray(np.full((2, 3), value), dtype)


def first(array: NDArray) -> float:
    values = array.asnumpy()
    assert (values == values[0, 0]).all()
    return float(values[0, 0])


def test_the_documented_calls_in_one_process(tmp_path: Path) -> None:
    """The examples of MXNet's page on the KVStore API."""
    kv = mx.create("local")
    assert (kv.type, kv.rank, kv.num_workers) == ("local", 0, 1)
    kv.init(3, full(2))
    a = full(0)
    kv.pull(3, out=a)
    assert first(a) == 2
    kv.push(3, full(8))
    kv.pull(3, out=a)
    assert first(a) == 8
    kv.push(3, [full(1)] * 4)  # one for each device
    kv.pull(3, out=a)
    assert first(a) == 4
    told = []

    def update(key: Any, received: Any, stored: Any) -> None:
        told.append(key)
        stored += received * 2

    kv._set_updater(update)
    kv.push(3, full(1))
    devices = [full(0), full(0)]
    kv.pull(3, out=devices)
    assert [first(array) for array in devices] == [6, 6]
    assert told == [3]
    keys = [5, 7, "name"]
    kv.init(keys, [full(1)] * 3)
    kv.push(keys, [full(1)] * 3)
    outs: list[Any] = [full(0), full(0), [full(0), full(0)]]
    kv.pull(keys, out=outs)
    assert [first(array) for array in (*outs[:2], *outs[2])] == [3, 3, 3, 3]
    with pytest.raises(NotAllowed, match="pull writes into out"):
        kv.pull(3)
    with pytest.raises(ShapeMismatch):
        kv.pull(3, out=NDArray([1.0]))
    with pytest.raises(KeyNotFound):
        kv.pull("new", out=a)
    with pytest.raises(NotAllowed, match=r"row_sparse_pull\(key, row_ids\)"):
        kv.row_sparse_pull(3, out=a, row_ids=NDArray([0]))
    kv.close()


def test_several_workers_dtypes_and_the_other_names(tmp_path: Path) -> None:
    def program(store: Any) -> list[float]:
        kv = mx.KVStore(store)
        out, half, value = full(0), full(0, np.float16), full(kv.rank + 1)
        kv.broadcast("w", full(kv.rank + 5), out=out)
        seen = [first(out)]
        kv.pushpull("w", full(kv.rank + 1), out=out)
        seen.append(first(out))
        kv.pushpull("w", value)  # into the value
        seen.append(first(value))
        kv.init("half", full(0, np.float16))
        kv.pushpull("half", full(1.5, np.float16), out=half, priority=-1)
        seen.append(first(half))
        kv.set_optimizer(SGD(1.0))
        kv._barrier()
        kv.pushpull("w", full(1), out=out)
        seen.append(first(out))
        kv.save_optimizer_states(tmp_path / f"states {kv.rank}")
        kv.load_optimizer_states(tmp_path / f"states {kv.rank}")
        assert kv.get_num_dead_node(4) == 0
        assert kv.is_capable("optimizer")
        for step in kv.steps(2, ["half"]):  # what MXNet does not have is kvd's
            kv.push("half", full(step, np.float16))
        with pytest.raises(NotAllowed, match=r"mx\.optimizer\.Adam is not sent: pass one of kvd\.optimizer"):
            kv.set_optimizer(type("Adam", (), {"__module__": "mxnet.optimizer"})())
        with pytest.raises(NotAllowed, match="controller"):
            kv._send_command_to_servers(99, "body")
        return seen

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program) == [[5, 3, 3, 3, 1]] * 2

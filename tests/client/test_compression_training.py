"""The handwritten digits reach the accuracy of plain gradients with every compressor at its defaults."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvd
from kvd.compression import known_compressors
from kvd.testing.cluster import LocalCluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"
EPOCHS, BATCH, RATE = 30, 96, 0.1


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracy(params: dict[str, Any]) -> float:
    train = example().train

    def program(kv: kvd.KVStore) -> float:
        kv.set_gradient_compression(params)
        return float(train(kv, EPOCHS, BATCH, RATE))

    with LocalCluster(2, 2) as cluster:
        first, second = cluster.run(program)
        assert first == second
        return first


@pytest.fixture(scope="module")
def plain() -> float:
    return accuracy({"type": "none"})


@pytest.mark.soak
@pytest.mark.parametrize("name", list(known_compressors()))
def test_the_accuracy_is_within_a_point(name: str, plain: float) -> None:
    assert plain > 0.95
    assert accuracy({"type": name, "min_bytes": 0}) > plain - 0.01

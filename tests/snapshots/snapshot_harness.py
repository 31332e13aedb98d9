"""What the tests of snapshots share: keys of every kind, written and read."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvd.optimizer import SGD
from kvd.optimizer.schedule import Cosine
from kvd.snapshots import manifest
from kvd.snapshots.manifest import Origin
from kvd.snapshots.writer import SnapshotWriter

ORIGIN = Origin("train", "dist_sync", "1f", 7, 2, SGD(Cosine(0.5, steps=20), momentum=0.9))
PART_BYTES = 4096


def content() -> dict[str, tuple[Any, int, int, dict[str, Any]]]:
    """Key → value, clock, updates, state. One value is larger than a part; names look like those of tensors."""
    rng = np.random.default_rng(5)
    momentum = rng.standard_normal(3000).astype(np.float32)
    half = rng.standard_normal((30, 4)).astype(np.float16)
    return {
        "large": (momentum.reshape(30, 100) * 2, 7, 7, {"momentum": momentum}),
        "large|0": (np.arange(5, dtype=np.int64), 6, 0, {}),
        "0|large": (half, 7, 7, {"master": half.astype(np.float32).ravel(), "momentum": momentum[:120]}),
        "scalar ü": (np.float32(2.5).reshape(()), 1, 1, {"momentum": momentum[:1]}),
        "empty": (np.empty((0, 3), np.float32), 7, 7, {"momentum": momentum[:0]}),
        "bfloat16": (np.arange(9).astype(ml_dtypes.bfloat16), 7, 0, {}),
        "float64": (np.linspace(0, 1, 600), 7, 7, {"momentum": np.linspace(1, 2, 600)}),
        "int8": (np.arange(-3, 3, dtype=np.int8), 2, 0, {}),
        "int32": (np.arange(3, dtype=np.int32), 2, 0, {}),
        "uint8": (np.arange(5000, dtype=np.uint32).astype(np.uint8), 2, 0, {}),
    }


def write(path: Path, origin: Origin = ORIGIN) -> None:
    writer = SnapshotWriter(path, origin, PART_BYTES)
    for key, (value, clock, updates, state) in content().items():
        writer.add(key, value, clock, updates, state)
    writer.finish()


def rewritten(path: Path, change: Any) -> None:
    """Changes the manifest as a program would that writes another one, with its checksum."""
    file = path / manifest.FILE
    plain = json.loads(file.read_bytes())
    change(plain)
    del plain["sha256"]
    plain["sha256"] = sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    file.write_text(json.dumps(plain))

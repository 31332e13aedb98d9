"""The recipes for Lightning and Trainer, run as they are written: two workers make the steps of plain torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import kvd
import kvd.torch as kt
from kvd.config import child_environment
from kvd.data import digits
from tests.docs.sources_harness import ROOT

pytestmark = pytest.mark.integrations

PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
SAVE = """
import numpy
numpy.save(f"{kv.rank}.npy", torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy())
"""
EPOCHS = 4


def alone(*, clip: float = 0.0, decays: bool = False) -> np.ndarray[Any, Any]:
    """The parameters of plain torch in one process, with the whole batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    data = digits.load()
    images, labels = torch.from_numpy(data.train_images.reshape(-1, 64)), torch.from_numpy(data.train_labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=56)
    with kvd.create("local") as kv:
        sampler = kt.ShardedSampler(images, kv, batch_size=96, drop_last=True)
        for step in range(EPOCHS * len(sampler)):
            whole = sampler.samples(step)
            optimizer.zero_grad()
            loss: Any = functional.cross_entropy(model(images[whole]), labels[whole])
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if decays:
                scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def run(name: str, folder: Path, workers: int = 2) -> list[np.ndarray[Any, Any]]:
    """The parameters that the workers end with."""
    (folder / name).write_text(PROGRAMS[name] + SAVE)
    launch = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", str(workers), "-s", "1", "--"]
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})
    command = [*launch, sys.executable, name]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [np.load(folder / f"{rank}.npy") for rank in range(workers)]


@pytest.mark.timeout(300)
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed: make test-integrations")
    first, second = run("with_lightning.py", tmp_path)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, alone(), rtol=0, atol=1e-5)
    assert (tmp_path / "model.ckpt").exists()


@pytest.mark.timeout(300)
def test_trainer(tmp_path: Path) -> None:
    """`Trainer` clips gradients to a norm of 1, after they were merged."""
    pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")
    first, second = run("with_trainer.py", tmp_path)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, alone(clip=1.0, decays=True), rtol=0, atol=1e-5)
    assert (tmp_path / "model").exists()

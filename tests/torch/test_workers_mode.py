"""`where="workers"`: gradients are those of `DistributedDataParallel`, bit for bit."""

from __future__ import annotations

from pathlib import Path

from kvd.testing.cluster import LocalCluster
from tests.torch.beside_ddp import CASES

PROGRAM = "from tests.torch.beside_ddp import main; main()"
TIMEOUT_S = 110


def test_two_workers_have_the_bits_of_ddp(tmp_path: Path) -> None:
    with LocalCluster(2, 1) as cluster:
        workers = [cluster.script(PROGRAM, number, str(tmp_path / "ddp")) for number in range(2)]
        try:
            outputs = [worker.communicate(timeout=TIMEOUT_S)[0].decode() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert all(f"same in {len(CASES)} trainings" in output for output in outputs), outputs

"""Every example runs to its end, alone and as a job of `kvd launch`, and learns something."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.config import child_environment
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.writer import SnapshotWriter
from kvd.testing.cluster import LocalCluster, wait_until

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
TIMEOUT_S = 110


def run(
    name: str,
    *arguments: str,
    workers: int = 0,
    servers: int = 1,
    hook: Path | None = None,
    launch: Sequence[str] = (),
) -> dict[int, str]:
    """Runs an example, as a job if `workers` are given, else here. Returns the last line of each worker, by rank.

    Args:
        launch: more options of `kvd launch`.
        hook: a folder with a sitecustomize.py for the processes of the job, whose workers are restarted once.
    """
    program = str(EXAMPLES / name)
    printed = run_job(program, arguments, workers, servers, hook, launch) if workers else run_here(program, arguments)
    results = re.findall(r"worker (\d+) of (\d+): (.*)", printed)
    assert sorted(int(rank) for rank, _, _ in results) == list(range(max(workers, 1))), printed
    assert {int(size) for _, size, _ in results} == {max(workers, 1)}
    return {int(rank): text for rank, _, text in results}


def run_here(program: str, arguments: Sequence[str]) -> str:
    """Runs a program as the main one of this process, which has imported most that it needs. Returns its output."""
    output, argv = io.StringIO(), sys.argv
    sys.argv = [program, *arguments]
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(program, run_name="__main__")
    finally:
        sys.argv = argv
    return output.getvalue()


def run_job(
    program: str, arguments: Sequence[str], workers: int, servers: int, hook: Path | None, launch: Sequence[str]
) -> str:
    """Runs a program as a job of `kvd launch`. Returns its output."""
    begins = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", str(workers), "-s", str(servers), *launch]
    command = [*begins, *(("--restart", "1") if hook else ()), "--", sys.executable, program, *arguments]
    path = f"{ROOT}:{ROOT / 'cli'}" + (f":{hook}" if hook else "")
    environment = child_environment({"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracies(results: dict[int, str]) -> list[float]:
    return [float(text.rpartition("accuracy ")[2]) for _, text in sorted(results.items())]


def test_train_gives_the_same_alone_and_in_a_cluster() -> None:
    alone = run("train.py", "--epochs", "3")
    together = run("train.py", "--epochs", "3", workers=3, servers=2)
    assert set(together.values()) == set(alone.values())
    assert min(accuracies(alone)) > 0.9


@pytest.mark.parametrize("kind", ["device", "dist_async"])
def test_train_in_other_types(kind: str) -> None:
    workers = 2 if kind.startswith("dist") else 0
    results = run("train.py", "--epochs", "5", "--rate", "0.1", "--type", kind, workers=workers)
    assert min(accuracies(results)) > 0.8


@pytest.mark.parametrize("workers", [0, 2])
def test_digits_group(workers: int) -> None:
    assert min(accuracies(run("digits_group.py", "--epochs", "2", "--devices", "4", workers=workers))) > 0.85


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_model(workers: int) -> None:
    pytest.importorskip("torch")
    results = run("torch_model.py", "--epochs", "2", "--devices", "cpu", "cpu", workers=workers)
    assert min(accuracies(results)) > 0.7


def test_a_program_for_horovod_runs_with_one_import_changed() -> None:
    """The calls of Horovod's documented example, in order; without that import it would run on Horovod."""
    pytest.importorskip("torch")
    text = (EXAMPLES / "horovod_digits.py").read_text(encoding="utf-8")
    imports = re.findall(r"^(?:import|from) .*", text, re.MULTILINE)
    assert [line for line in imports if "kvd" in line] == [
        "import kvd.compat.horovod.torch as hvd",
        "from kvd.data import digits",
    ]
    together = run("horovod_digits.py", workers=2)
    assert len(set(together.values())) == 1
    assert min(accuracies(together)) > 0.85


@pytest.mark.skipif(find_spec("optax") is None, reason="JAX is not installed: pip install jax optax")
def test_jax_digits_gives_the_same_alone_and_in_a_cluster() -> None:
    alone = run("jax_digits.py", "--epochs", "3")
    together = run("jax_digits.py", "--epochs", "3", workers=2)
    assert set(together.values()) == set(alone.values())
    assert min(accuracies(alone)) > 0.85


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_sparse_embedding(workers: int) -> None:
    results = run("sparse_embedding.py", "--library", "numpy", workers=workers, servers=2)
    assert min(accuracies(results)) > 0.85
    assert len(set(results.values())) == 1  # the same rows in every worker


@pytest.mark.soak
def test_sparse_embedding_with_torch_learns_the_same() -> None:
    pytest.importorskip("torch")
    of_torch, of_numpy = (
        accuracies(run("sparse_embedding.py", "--steps", "50", "--library", library)) for library in ("torch", "numpy")
    )
    assert abs(of_torch[0] - of_numpy[0]) < 0.002


@pytest.mark.parametrize("workers", [0, 3])
def test_allreduce_logistic(workers: int) -> None:
    results = run("allreduce_logistic.py", workers=workers)
    assert min(accuracies(results)) > 0.9
    for text in results.values():
        first, last = re.findall(r"\d\.\d+", text)[:2]
        assert float(first) == 0.693
        assert float(last) < 0.2


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("dist_async", 2), *[pytest.param(*more, marks=pytest.mark.soak) for more in (("local", 0), ("dist_sync", 3))]],
)
def test_local_sgd(kind: str, workers: int) -> None:
    results = run("local_sgd.py", "--rounds", "8", "--type", kind, workers=workers)
    assert min(accuracies(results)) > 0.85
    if kind == "dist_sync":
        assert len(set(results.values())) == 1


SMALL_GPT = ("--steps", "40", "--every", "10", "--width", "32", "--layers", "1", "--context", "32", "--batch", "4")
SABOTEUR = """
import os, pathlib, signal, threading, time
node, marks = os.environ.get("KVD_NODE_ID", ""), pathlib.Path(__file__).parent
name, _, steps = (marks / "victims").read_text().partition(" ")
if os.environ.get("KVD_ROLE") == "worker" and node == name and not (marks / node).exists():
    import torch
    backward, calls, dies_at = torch.Tensor.backward, 0, [int(step) for step in steps.split()]
    def stepping(self, *arguments, **keywords):
        global calls
        calls += 1
        if calls == dies_at[0]:  # a server dies, and the training goes on
            (marks / "server").touch()
        if calls == dies_at[1]:
            (marks / node).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(self, *arguments, **keywords)
    torch.Tensor.backward = stepping
if node == "server-1" and not (marks / "server-died").exists():
    def die():
        while not (marks / "server").exists():
            time.sleep(0.02)  # nothing of kvd is imported here
        (marks / "server-died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=die, daemon=True).start()
"""


def losses(text: str) -> float:
    return float(text.partition("loss ")[2].partition(",")[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("where", "seed"),
    [
        ("servers", 1),
        ("workers", 2),
        *[pytest.param(where, seed, marks=pytest.mark.soak) for where in ("servers", "workers") for seed in (3, 4, 5)],
    ],
)
def test_gpt_ends_with_the_same_bits_though_a_worker_and_a_server_are_killed(
    tmp_path: Path, where: str, seed: int
) -> None:
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(2, 40), 2))
    (tmp_path / "victims").write_text(f"worker-{chance.randrange(2)} {steps[0]} {steps[1]}")
    (tmp_path / "sitecustomize.py").write_text(SABOTEUR)
    options = (*SMALL_GPT, "--where", where)
    copies = ("--replicas", "2")
    killed = run("gpt.py", *options, workers=2, servers=2, hook=tmp_path, launch=copies)
    assert len(list(tmp_path.glob("worker-*"))) == 1
    assert (tmp_path / "server-died").exists()
    undisturbed = run("gpt.py", *options, workers=2, servers=2, launch=copies)
    assert len(set(undisturbed.values())) == 1
    assert killed == undisturbed
    assert losses(killed[0]) < 4  # that of even chances is 4.85


@pytest.mark.timeout(300)
def test_gpt_with_rare_exchanges_goes_on_after_a_death_with_equal_weights(tmp_path: Path) -> None:
    chance = random.Random(5)
    (tmp_path / "victims").write_text(f"worker-1 50 {chance.randrange(12, 38)}")
    (tmp_path / "sitecustomize.py").write_text(SABOTEUR)
    options = ("--where", "local-sgd", "--fragments", "2")
    results = run("gpt.py", *SMALL_GPT, *options, workers=2, hook=tmp_path)
    assert (tmp_path / "worker-1").exists()
    assert len(set(results.values())) == 1
    assert losses(results[0]) < 4


KILLER = """
import os, pathlib, signal
node, marks = os.environ.get("KVD_NODE_ID", ""), pathlib.Path(__file__).parent
last = {"worker-0": 10, "worker-1": 17}.get(node)  # the push after which this worker is killed, once
if last is not None and os.environ.get("KVD_ROLE") == "worker" and not (marks / node).exists():
    import kvd
    pushpull, calls = kvd.KVStore.pushpull, 0
    def pushed(self, *arguments, **keywords):
        global calls
        calls += 1
        result = pushpull(self, *arguments, **keywords)
        if calls == last:
            (marks / node).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    kvd.KVStore.pushpull = pushed
"""


def test_a_training_with_checkpoints_ends_with_the_same_bits(tmp_path: Path) -> None:
    """It is stopped at step 34, and goes on after the snapshot of 30 with another number of servers. Or worker 0 is
    killed before it saves step 10, and worker 1 between two checkpoints."""
    whole, parts, killed = tmp_path / "whole", tmp_path / "parts", tmp_path / "killed"
    undisturbed = run("checkpoint.py", str(whole), "--steps", "55", workers=2)

    run("checkpoint.py", str(parts), "--steps", "34", workers=2, servers=2)
    continued = run("checkpoint.py", str(parts), "--steps", "55", workers=2)
    assert {text.partition(",")[0] for text in continued.values()} == {"from step 30 to 55"}
    digests = {text.partition("digest ")[2] for results in (continued, undisturbed) for text in results.values()}
    assert len(digests) == 1

    (tmp_path / "sitecustomize.py").write_text(KILLER)
    assert run("checkpoint.py", str(killed), "--steps", "55", workers=2, hook=tmp_path) == undisturbed
    assert (tmp_path / "worker-0").exists()
    assert (tmp_path / "worker-1").exists()
    assert sorted(path.name for path in killed.iterdir()) == sorted(path.name for path in whole.iterdir())


def test_a_checkpoint_has_the_state_of_the_optimizer(tmp_path: Path) -> None:
    """Without the momentum, the same weights go on to other ones."""
    run("checkpoint.py", str(tmp_path / "a"), "--steps", "20")
    taken = StoredSnapshot.open(tmp_path / "a" / "step-000020")
    (tmp_path / "b").mkdir()
    writer = SnapshotWriter(tmp_path / "b" / "step-000020", taken.manifest.origin)
    for key in taken.manifest.keys:
        writer.add(key.key, taken.value(key), key.clock, key.updates, {})
    writer.finish()
    right, wrong = (run("checkpoint.py", str(tmp_path / name), "--steps", "30")[0] for name in ("a", "b"))
    assert right.partition(",")[0] == wrong.partition(",")[0] == "from step 20 to 30"
    assert right != wrong


def write_idx(path: Path, array: Any) -> None:
    with gzip.open(path, "wb") as file:
        file.write(pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes())


@pytest.fixture
def small_files(tmp_path: Path) -> Path:
    """Ten kinds of pictures that are easy to tell apart: one bright stripe each, and noise."""
    chance = np.random.default_rng(0)
    for part, count in (("train", 400), ("t10k", 100)):
        labels = np.arange(count) % 10
        images = chance.integers(0, 60, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 3 : 2 * label + 5] += 180
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_fashion_mnist_with_small_files(small_files: Path, workers: int) -> None:
    batch = "20" if workers == 0 else "10"
    results = run("fashion_mnist.py", str(small_files), "--epochs", "5", "--batch", batch, workers=workers)
    assert min(accuracies(results)) > 0.8


def test_all_workers_make_the_same_number_of_steps_whoever_comes_and_goes(small_files: Path) -> None:
    """One of two workers leaves after the first call, and another one takes its seat. It sees one worker at first."""
    spec = importlib.util.spec_from_file_location("fashion_mnist", EXAMPLES / "fashion_mnist.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def train(kv: kvd.KVStore) -> int:
        example.train(kv, small_files, 5, 10, ["cpu"], None)
        kv.set_barrier_before_exit(False)
        steps = kv.version("dense0_weight")
        kv.close()
        return steps

    with ThreadPoolExecutor(1) as pool, LocalCluster(2, 1, max_workers=3) as cluster:
        stays, leaves = cluster.open_stores()
        trained = pool.submit(train, stays)
        steps = int(leaves.broadcast("steps", np.array([0]))[0])
        leaves.set_barrier_before_exit(False)
        leaves.close()
        wait_until(lambda: stays.num_workers == 1, "the first worker is alone")
        comes = cluster.store()
        assert train(comes) == trained.result() == 5 * steps == 100


def test_fashion_mnist_says_where_the_files_are(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="dataset-fashion-mnist"):
        run_here(str(EXAMPLES / "fashion_mnist.py"), [str(tmp_path)])


def test_fashion_mnist_with_the_real_files() -> None:
    if not FASHION_MNIST.exists():
        pytest.skip(f"no {FASHION_MNIST}: apt install dataset-fashion-mnist")
    assert min(accuracies(run("fashion_mnist.py", "--epochs", "1", "--limit", "3000", "--batch", "32"))) > 0.5


def test_every_example_is_here() -> None:
    tested = set(re.findall(r"\"(\w+\.py)\"", Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} <= tested

"""Who can read the files that kvd writes, and what stands at their names: links, pipes and devices."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.cluster.kept_files import KeptFile
from kvd.client.cluster.kept_folder import KeptFolder
from kvd.config import load
from kvd.errors import ConfigError, KvdError
from kvd.files import new_file, open_file, read_file
from kvd.node.daemon.ready_file import ReadyFile
from kvd.node.keys.allowed_keys import AllowedKeys
from kvd.node.keys.keyfiles import read_key
from kvd.node.storage.state_file import SchedulerStateFile
from kvd_cli.values import read_array, write_array

OPEN_UMASK = 0o000


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Without a umask, only what kvd asks for keeps others out."""
    before = os.umask(OPEN_UMASK)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def store() -> Any:
    kv = kvd.create("local")
    kv.init("w", np.ones(8, np.float32))
    kv.set_optimizer(kvd.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    kv.push("w", np.ones(8, np.float32))
    return kv


# ── who can read what is written ──


def test_snapshots_and_states_are_their_owners_alone(tmp_path: Path) -> None:
    with store() as kv:
        kv.snapshot(tmp_path / "snapshot")
        kv.save_optimizer_states(tmp_path / "states")
    assert mode(tmp_path / "snapshot") == 0o700
    assert {mode(path) for path in (tmp_path / "snapshot").iterdir()} == {0o600}
    assert mode(tmp_path / "states") == 0o600


def test_a_file_that_is_replaced_keeps_the_mode_that_its_owner_gave_it(tmp_path: Path) -> None:
    path = tmp_path / "states"
    path.touch()
    path.chmod(0o640)
    with store() as kv:
        kv.save_optimizer_states(path)
    assert mode(path) == 0o640


def test_the_state_of_a_scheduler_is_its_owners_alone(tmp_path: Path) -> None:
    state = SchedulerStateFile(tmp_path / "state", "the scheduler")
    state.prepare()
    state.save({"generation": 1})
    assert mode(tmp_path / "state") == 0o700
    assert {mode(path) for path in (tmp_path / "state").iterdir()} == {0o600}
    state.close()


def test_kept_residuals_are_their_owners_alone(tmp_path: Path) -> None:
    folder = KeptFolder(tmp_path / "state", 0)
    folder.open(emptied=True)
    KeptFile(folder.path / "a.kept", b"identity", (4,))
    assert mode(folder.path) == 0o700
    assert mode(folder.path / "a.kept") == 0o600


def test_what_is_exported_follows_the_umask(tmp_path: Path) -> None:
    """As with `np.save`: a user names the file, to use it elsewhere. The ready file has no secret."""
    write_array(tmp_path / "value.npy", np.ones(3))
    ready = ReadyFile(tmp_path / "ready")
    ready.check()
    ready.write("tcp://127.0.0.1:1")
    assert mode(tmp_path / "value.npy") == 0o666
    assert mode(tmp_path / "ready") == 0o666
    assert {path.name for path in tmp_path.iterdir()} == {"value.npy", "ready"}


# ── links at names that others can foresee ──


def test_no_link_at_the_name_of_a_new_file_is_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for name in ("ready.part", "probe.part", "a.part"):
        (tmp_path / name).symlink_to(mine)
    ready = ReadyFile(tmp_path / "ready")
    ready.check()
    (tmp_path / "ready.part").symlink_to(mine)
    assert ready.write("tcp://127.0.0.1:1")
    KeptFile(tmp_path / "a.kept", b"identity", (4,))
    kept = KeptFolder(tmp_path, 0)
    kept.path.mkdir()
    (kept.path / "probe.part").symlink_to(mine)
    kept.open(emptied=False)
    assert mine.read_text() == "precious"
    assert not (tmp_path / "ready").is_symlink()


def test_a_link_to_nothing_does_not_become_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.part").symlink_to(tmp_path / "nothing")
    new_file(tmp_path / "a.part").close()
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to, lambda path, _to: os.mkfifo(path)])
def test_a_lock_that_is_a_link_is_refused(link: Callable[[Path, Path], None], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "state").mkdir()
    link(tmp_path / "state" / "scheduler.lock", mine)
    with pytest.raises(ConfigError, match=r"scheduler\.lock in it is a link to another file, or no file: remove it"):
        SchedulerStateFile(tmp_path / "state", "the scheduler").prepare()
    assert mine.read_text() == "precious"


# ── pipes and devices at names that a user gives ──


def load_states(path: Path) -> None:
    with store() as kv:
        kv.load_optimizer_states(path)


def restore(path: Path) -> None:
    """The path is one of the snapshot's files."""
    path.rename(path.with_name("special"))
    with store() as kv:
        kv.snapshot(path.with_name("snapshot"))
    for name in ("part-00000.safetensors", "snapshot.json"):
        file = path.with_name("snapshot") / name
        if file.exists():
            file.unlink()
            path.with_name("special").rename(file)
            break
    else:
        raise AssertionError(f"{list(path.with_name('snapshot').iterdir())}")
    with store() as kv:
        kv.restore(path.with_name("snapshot"))


READERS: list[Callable[[Path], object]] = [
    read_file,
    open_file,
    read_key,
    AllowedKeys,
    read_array,
    lambda path: load({}, file=path),
    lambda path: SchedulerStateFile(path.parent).load() if path.rename(path.parent / "scheduler.json") else None,
    load_states,
    restore,
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(
    read: Callable[[Path], object], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "special"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    outcome: list[BaseException | None] = []

    def attempt() -> None:
        try:
            read(path)
        except BaseException as error:  # noqa: BLE001
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60.0)
    assert outcome, "it waits"
    assert isinstance(outcome[0], OSError | KvdError), outcome
    assert "not an ordinary file" in str(outcome[0]) or "is not a file" in str(outcome[0])

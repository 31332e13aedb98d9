"""What compression has left over survives the restart of its worker, in files; if they are damaged, it begins anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.client.calls.values import Source
from kvd.client.cluster.compression import GradientCompression, Room
from kvd.client.cluster.kept_files import KeptFile
from kvd.compression import parse
from kvd.errors import ConfigError
from kvd.protocol.specs import KeySpec

SHAPE = (60, 50)
SPEC = KeySpec("float32", SHAPE, 4096)
WAYS: list[dict[str, Any]] = [
    {"type": "2bit"},
    {"type": "2bit", "momentum": "nesterov"},
    {"type": "randomk"},
    {"type": "powersgd", "rank": 2},
    {"type": "dithering", "momentum": "nesterov"},
]


def gradient(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).normal(size=SHAPE).astype(np.float32)


class Worker:
    """The compression of a worker, whose pushes set out at once. It is gone when it is dropped."""

    def __init__(self, params: dict[str, Any], *, goes_on_at: int | None = None) -> None:
        self.clock = goes_on_at or 0
        self.compression = GradientCompression(0, goes_on_at is not None, lambda name: self.clock)
        self.use(params)

    def use(self, params: dict[str, Any]) -> None:
        self.compression.use(parse({"min_bytes": 0, **params}))

    def push(self, step: int, *, sets_out: bool = True, name: str = "w") -> bytes:
        """The bytes of the push of this step."""
        compressing = self.compression.current
        assert compressing is not None
        layout = compressing.layout(SPEC)
        assert layout is not None
        room = Room(layout, np.zeros(layout.nbytes, np.uint8))
        source = Source(gradient(step).reshape(-1).view(np.uint8), SPEC)
        _, note = self.compression.encode(compressing, name, source, room)
        if sets_out:
            self.clock += 1
            if note is not None:
                note(self.clock)
        return room.memory.tobytes()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("params", WAYS, ids=str)
def test_a_successor_goes_on_with_what_belongs_to_the_last_push_that_counted(
    params: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed ahead of a push, when it is encoded, when it has set out, and when it has counted."""
    undisturbed = Worker(params)
    expected = [undisturbed.push(step) for step in range(8)]
    kept = {**params, "state_dir": str(tmp_path)}
    worker = Worker(kept)
    assert [worker.push(step) for step in range(2)] == expected[:2]
    worker = Worker(kept, goes_on_at=2)
    assert worker.push(2) == expected[2]
    assert worker.push(3, sets_out=False) == expected[3]
    worker = Worker(kept, goes_on_at=3)
    assert worker.push(3) == expected[3]
    worker = Worker(kept, goes_on_at=3)  # it has set out, and has not counted
    assert [worker.push(step) for step in (3, 4)] == expected[3:5]
    Worker(kept, goes_on_at=5)  # killed before it pushed
    worker = Worker(kept, goes_on_at=5)
    assert [worker.push(step) for step in (5, 6, 7)] == expected[5:]
    assert messages(caplog) == []


def test_a_worker_is_killed_while_it_encodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"type": "2bit", "state_dir": str(tmp_path)}
    worker, undisturbed = Worker(kept), Worker({"type": "2bit"})
    expected = [undisturbed.push(step) for step in range(4)]
    worker.push(0), worker.push(1)
    with monkeypatch.context() as patch:
        patch.setattr(KeptFile, "end", lambda *_: None)  # it does not come so far
        worker.push(2, sets_out=False)
    worker = Worker(kept, goes_on_at=2)
    assert [worker.push(step) for step in (2, 3)] == expected[2:]
    assert messages(caplog) == []


def test_without_a_directory_a_successor_begins_anew(tmp_path: Path) -> None:
    worker = Worker({"type": "2bit"})
    first = [worker.push(step) for step in range(3)]
    assert Worker({"type": "2bit"}, goes_on_at=2).push(2) != first[2]
    assert list(tmp_path.iterdir()) == []


def test_another_compression_goes_on_with_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = {"state_dir": str(tmp_path)}
    ways: list[dict[str, Any]] = [{"type": "2bit"}, {"type": "powersgd"}, {"type": "topk", "k": 0.1}]

    def pushes(extra: dict[str, Any], *, is_killed: bool) -> list[bytes]:
        worker, found = Worker({**ways[0], **extra}), []
        for step, way in enumerate(ways):
            worker.use({**way, **extra})
            found.append(worker.push(step))
        if is_killed:
            worker = Worker({**ways[2], **extra}, goes_on_at=3)
        return [*found, worker.push(3)]

    assert pushes(kept, is_killed=True) == pushes({}, is_killed=False)
    assert messages(caplog) == []


def the_file(folder: Path) -> Path:
    (path,) = (folder / "worker-0").iterdir()
    return path


def cut(data: bytearray) -> bytes:
    return bytes(data[:-1])


def emptied(data: bytearray) -> bytes:
    return b""


def other(data: bytearray) -> bytes:
    data[20] ^= 1
    return bytes(data)


def torn_mark(data: bytearray) -> bytes:
    data[2048] ^= 1  # that of the second push
    data[2048 + 8] ^= 4
    return bytes(data)


def torn_values(data: bytearray) -> bytes:
    data[4096:8192] = bytes(4096)  # a page of it was never written
    return bytes(data)


@pytest.mark.parametrize("damage", [cut, emptied, other, torn_mark, torn_values])
def test_a_damaged_file_is_noticed(damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = {"type": "2bit", "state_dir": str(tmp_path)}
    worker = Worker(kept)
    worker.push(0), worker.push(1)
    path = the_file(tmp_path)
    path.write_bytes(damage(bytearray(path.read_bytes())))
    worker = Worker(kept, goes_on_at=2)
    anew = Worker({"type": "2bit"})
    assert [worker.push(step) for step in (2, 3)] == [anew.push(step) for step in (2, 3)]
    (message,) = messages(caplog)
    assert message.startswith(f"what compression had left over of key 'w' begins at 0: {path} is of no use: it ")
    caplog.clear()
    worker = Worker(kept, goes_on_at=4)  # what was written since is in order again
    assert worker.push(4) == anew.push(4)
    assert messages(caplog) == []


def test_a_push_that_is_too_far_back_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of three pushes that were encoded ahead of the first one's counting, two generations are kept."""
    kept = {"type": "2bit", "state_dir": str(tmp_path)}
    worker = Worker(kept)
    for step in range(4):
        worker.push(step)
    assert Worker(kept, goes_on_at=1).push(1) == Worker({"type": "2bit"}).push(1)
    (message,) = messages(caplog)
    assert message.endswith("is of no use: it has nothing of push 1 of the key, the last one that counts")


def test_pushes_that_were_sent_plain_change_nothing(tmp_path: Path) -> None:
    kept = {"type": "2bit", "state_dir": str(tmp_path)}
    worker, undisturbed = Worker(kept), Worker({"type": "2bit"})
    assert worker.push(0) == undisturbed.push(0)
    assert Worker(kept, goes_on_at=3).push(1) == undisturbed.push(1)  # two with cast=True


def test_files_go_with_their_keys_and_their_worker(tmp_path: Path) -> None:
    kept = {"type": "2bit", "state_dir": tmp_path}
    worker = Worker(kept)
    worker.push(0), worker.push(0, name="v")
    assert len(list((tmp_path / "worker-0").iterdir())) == 2
    worker.compression.forget(["v"])
    assert the_file(tmp_path).suffix == ".kept"
    worker.compression.use(None)
    assert list((tmp_path / "worker-0").iterdir()) == []
    worker.use(kept)
    worker.push(1)
    Worker(kept)  # of another run: it replaces no worker
    assert list((tmp_path / "worker-0").iterdir()) == []


def test_a_directory_that_cannot_be_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"state_dir: '.*file/worker-0' cannot be written to: Not a dir"):
        Worker({"type": "2bit", "state_dir": str(tmp_path / "file")})
    worker, plain = Worker({"type": "2bit", "state_dir": str(tmp_path)}), Worker({"type": "2bit"})
    (tmp_path / "worker-0").rmdir()
    assert [worker.push(step) for step in range(3)] == [plain.push(step) for step in range(3)]
    (message,) = messages(caplog)
    assert message.startswith("state_dir: what compression leaves over does not survive a restart of this worker: ")

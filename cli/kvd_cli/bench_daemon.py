"""A daemon of `kvd bench -v`, started as ``python -m kvd_cli.bench_daemon``: ``kvd`` itself, which can be counted.

Between `BEGIN` and `END` it counts the functions of Python that its main thread calls, where a daemon does everything
but large updates. It lets any process of its user trace it, so that its system calls can be counted, too.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from kvd_cli import main
from kvd_cli.bench_counting import BEGIN, END, FOLDER, Calls, allow_tracing, begun_file, calls_file


def _count() -> None:
    folder, pid, calls = Path(os.environ[FOLDER]), os.getpid(), Calls()

    def begin(number: int, frame: FrameType | None) -> None:
        calls.begin()
        begun_file(folder, pid).touch()

    def end(number: int, frame: FrameType | None) -> None:
        counted = calls.end()
        begun_file(folder, pid).unlink(missing_ok=True)
        unfinished = calls_file(folder, pid).with_suffix(".tmp")
        unfinished.write_text(str(counted))
        unfinished.rename(calls_file(folder, pid))

    signal.signal(BEGIN, begin)
    signal.signal(END, end)


if __name__ == "__main__":
    if sys.argv[1:2] == ["server"]:
        _count()
        allow_tracing()
    main.main()

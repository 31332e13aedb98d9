"""The numbers that a process prints, as they come."""

from __future__ import annotations

import subprocess
import sys
import threading


class PrintedNumbers:
    """The lines that a process has printed so far, as numbers. Any other line goes to stderr."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.numbers: list[float] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.numbers.append(float(line))
            except ValueError:
                sys.stderr.write(line.decode())

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self._thread.join()

"""The exit codes that only a program at a terminal has. Imports nothing: `main` needs them before all else."""

from __future__ import annotations

from typing import Final

INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

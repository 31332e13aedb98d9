"""Exit codes of the program. Imports nothing, because `main` needs them first."""

from __future__ import annotations

from typing import Final

INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

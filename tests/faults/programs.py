"""What tests see of programs in processes of their own: what they print, and which state the cluster has them in.

A program prints lines as it goes on, and its result as JSON in the last one.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any, Final

DEADLINE_S = 120.0
WITHOUT_NOTICES: Final = {"notice_s": 2 * DEADLINE_S}
"""Settings of programs whose lines are read one by one: on a busy machine they wait so long that kvd says for whom."""


def line(process: subprocess.Popen[bytes]) -> str:
    """The next line of the program; waits for it. That it waits for others to join is passed over."""
    assert process.stdout is not None
    while (text := process.stdout.readline().decode().strip()).startswith("waiting for "):
        pass
    return text


def finish(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The result, once the program has ended well."""
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output.decode()
    result: dict[str, Any] = json.loads(output.decode().strip().splitlines()[-1])
    return result


def states(observer: Any) -> list[str]:
    """The states of all workers that have joined."""
    return [member["state"] for member in observer.status()["members"] if member["role"] == "worker"]

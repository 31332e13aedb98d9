"""The program ``kvd``: how its process begins and ends. What it does is in `kvd_cli.program`.

Little is imported here: what all commands need takes half a second to import, and who presses Ctrl-C meanwhile wants
to see no traceback.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import Final, NoReturn

from kvd_cli import streams

FAILED: Final = 1
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141


def main() -> NoReturn:
    """Run the command line with the arguments of this process, then exit."""
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is to be ignored
    code = FAILED
    try:
        if is_interruptible:
            signal.signal(signal.SIGINT, _leave)
            # The interpreter takes handlers away before it is done, and then an interrupt would change the exit code.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        code = _run(is_interruptible)
        streams.flush()
    except BrokenPipeError:
        code = PIPE_CLOSED
        streams.forget_stdout()
    except streams.OutputError as error:
        code = FAILED
        streams.forget_stdout()
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _run(is_interruptible: bool) -> int:
    """The exit code of the command. An interrupt raises while it runs, and ends the process before and after that."""
    try:
        streams.prepare()
        from kvd_cli.program import run  # only now that an interrupt is dealt with

        if is_interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    finally:
        if is_interruptible:
            signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> NoReturn:
    """End at once: nothing has begun yet, or all is done."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

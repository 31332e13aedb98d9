"""The program ``kvd``: how its process begins and ends. What it does is in `kvd_cli.program`.

Little is imported here: the imports that all commands need take half a second, and Ctrl-C must not show a traceback
meanwhile.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import Final, NoReturn

from kvd_cli import streams
from kvd_cli.exit_codes import INTERRUPTED, PIPE_CLOSED

FAILED: Final = 1


def main() -> NoReturn:
    """Run the command line with the arguments of this process, then exit."""
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else we ignore it too
    code = FAILED
    try:
        if is_interruptible:
            signal.signal(signal.SIGINT, _leave)
            # The interpreter removes handlers before it is done; an interrupt would then change the exit code.
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
    """The exit code of the command. An interrupt raises while it runs, and ends the process before and after."""
    try:
        streams.prepare()
        from kvd_cli.program import run  # not before interrupts are handled

        if is_interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    finally:
        if is_interruptible:
            signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> NoReturn:
    """End at once: nothing has begun yet, or everything is done."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

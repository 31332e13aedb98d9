"""Start and end of the program ``kvd``. Its commands are in `kvd_cli.program`.

Little is imported here: the imports that all commands need take half a second, and Ctrl-C must not show a traceback
meanwhile.
"""

from __future__ import annotations

import sys
from typing import Final, NoReturn

from kvd_cli import interrupts, streams
from kvd_cli.exit_codes import INTERRUPTED, PIPE_CLOSED

FAILED: Final = 1


def main() -> NoReturn:
    """Run the command line with the arguments of this process, then exit."""
    code = FAILED
    try:
        interrupts.prepare()
        code = _run()
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


def _run() -> int:
    """Run the command, and return its exit code."""
    try:
        streams.prepare()
        from kvd_cli.program import run  # not before interrupts are handled

        return run()
    finally:
        interrupts.command_ended()


if __name__ == "__main__":
    main()

"""The exit codes of kvd's programs."""

from __future__ import annotations

from enum import IntEnum

from kvd.errors import ConfigError, ConnectError, KvdError, RequestTimeout


class ExitCode(IntEnum):
    """What an exit code means."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_CONNECTION = 3
    TIMED_OUT = 4


def exit_code_of(error: KvdError) -> ExitCode:
    """The exit code that an error stands for."""
    if isinstance(error, ConfigError):
        return ExitCode.USAGE
    if isinstance(error, ConnectError):
        return ExitCode.NO_CONNECTION
    return ExitCode.TIMED_OUT if isinstance(error, RequestTimeout) else ExitCode.FAILED

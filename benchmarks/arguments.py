"""How the commands of this directory read their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvd_cli.bench_work import names_of


def works(text: str) -> tuple[str, ...]:
    """Names of works, separated by commas."""
    try:
        return tuple(names_of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def some_of(choices: tuple[str, ...], *, none_too: bool = False) -> Callable[[str], tuple[str, ...]]:
    """A list of these names, each once, separated by commas."""

    def read(text: str) -> tuple[str, ...]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(choices)}")
        if not names and not none_too:
            raise argparse.ArgumentTypeError(f"name at least one of {', '.join(choices)}")
        return tuple(dict.fromkeys(names))

    return read


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, each once, separated by commas."""
    numbers = [int(word) for word in text.split(",") if word.strip()]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0")
    return tuple(dict.fromkeys(numbers))


def new_file(text: str) -> Path:
    """A file that can be created; checked before the measurements, which take many minutes."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory, or its directory does not exist")
    return path


def checkout(text: str) -> Path:
    """A folder with the sources of kvd."""
    path = Path(text).resolve()
    if not (path / "kvd" / "__init__.py").is_file() or not (path / "cli" / "kvd_cli").is_dir():
        raise argparse.ArgumentTypeError(f"no kvd is checked out in {text}: git worktree add {text} REVISION does that")
    return path


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """A number above 0."""

    def read(text: str) -> float:
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    read.__name__ = "whole number" if kind is int else "number"  # argparse names it in its error
    return read


def deaths(prog: str, description: str | None) -> argparse.ArgumentParser:
    """What is asked of a training whose processes are killed."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--kills", type=positive(int), default=20)
    parser.add_argument("--megabytes", type=positive(float), default=2.0, help="size of the model")
    parser.add_argument("--computes", type=positive(float), default=0.01, metavar="SECONDS", help="in each step")
    parser.add_argument("--seed", type=int, default=1)
    return parser

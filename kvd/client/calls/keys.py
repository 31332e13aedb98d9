"""Keys as programs write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.errors import KeyNotFound, NotAllowed
from kvd.protocol.specs import MAX_KEY_CHARS


def key_name(key: object, what: str = "a key") -> str:
    """The name of a key: a text as it is, a whole number as its decimal digits. Raises NotAllowed for anything else.

    Args:
        what: what the text of an error calls it.
    """
    if type(key) is str:
        name = key
    elif isinstance(key, bool) or not isinstance(key, str | int | np.integer):
        raise NotAllowed(f"{what} is a str or an int, not {type(key).__name__}")
    else:
        name = _digits(key, what)
    if not 0 < len(name) <= MAX_KEY_CHARS:
        raise NotAllowed(f"{what} has 1 to {MAX_KEY_CHARS} characters, not {len(name)}", key=name[:40])
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise NotAllowed(f"{what} is a text that UTF-8 can write, {name!r} is not") from None
    return name


def _digits(key: str | int | np.integer[Any], what: str) -> str:
    try:
        return str(key)
    except ValueError:  # Python refuses to print integers of thousands of digits
        raise NotAllowed(f"{what} has 1 to {MAX_KEY_CHARS} characters, not thousands") from None


def key_list(key: object) -> tuple[list[str], bool]:
    """The names of one key or of a list of keys, and whether it was a list.

    Raises:
        NotAllowed: an entry is not a key, or a key is in the list twice.
    """
    if not isinstance(key, list | tuple):
        return [key_name(key)], False
    names = [key_name(entry) for entry in key]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise NotAllowed(f"the list names {', '.join(map(repr, twice))} more than once: sum such values first")
    return names, True


def missing(name: str) -> KeyNotFound:
    """The error of a call on a key that nobody made."""
    return KeyNotFound(f"no key is called {name!r}: init it first", key=name)

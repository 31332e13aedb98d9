"""Keys as programs write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MappingView, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvd.errors import KeyNotFound, NotAllowed, RemoteError
from kvd.protocol.specs import MAX_KEY_CHARS

T = TypeVar("T")


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


class KeyList(NamedTuple):
    """The keys of a call.

    Attributes:
        names: each key once, in the order in which they first occur.
        many: whether the program gave a list.
        places: for each entry of that list the index of its name; None: entry i is name i.
        written: the whole numbers among the keys, by name.
    """

    names: list[str]
    many: bool
    places: list[int] | None = None
    written: Mapping[str, int] = MappingProxyType({})

    @property
    def size(self) -> int:
        """How many values go with the keys."""
        return len(self.names if self.places is None else self.places)

    def key(self, name: str) -> str | int:
        """The key of this name as the program wrote it."""
        return self.written.get(name, name)

    def at(self, place: int) -> str | int:
        """The key at this place of the program's list."""
        return self.key(self.names[place if self.places is None else self.places[place]])

    def by_name(self, entries: Sequence[T]) -> list[list[T]]:
        """The entries of a list, one per place, as a list per name."""
        found: list[list[T]] = [[] for _ in self.names]
        for place, entry in zip(self.places or range(len(self.names)), entries, strict=True):
            found[place].append(entry)
        return found

    def by_place(self, found: Sequence[Sequence[T]]) -> list[T]:
        """The inverse of `by_name`."""
        left = [iter(entries) for entries in found]
        return [next(left[place]) for place in self.places or range(len(self.names))]

    def check_distinct(self, call: str) -> None:
        """Raises NotAllowed if a key is in the list twice: `call` gives each one value."""
        if self.places is not None:
            twice = sorted({self.names[place] for place in self.places if self.places.count(place) > 1})
            shown = ", ".join(repr(self.key(name)) for name in twice)
            raise NotAllowed(f"the list names {shown} more than once: {call} takes one value for each key")


def key_list(key: object) -> KeyList:
    """One key, or a list of keys. Raises NotAllowed if an entry is not a key."""
    if not isinstance(key, list | tuple):
        if isinstance(key, MappingView | Iterator):
            raise NotAllowed(f"keys are a list or a tuple, not {type(key).__name__}: pass list(…) of it")
        name = key_name(key)
        return KeyList([name], False) if isinstance(key, str) else KeyList([name], False, None, {name: int(name)})
    names = []
    for place, entry in enumerate(key):
        try:
            names.append(key_name(entry))
        except NotAllowed as error:
            error.args = (f"{error.args[0]} (entry {place} of the list of keys)", *error.args[1:])
            raise
    written = {name: int(name) for name, entry in zip(names, key, strict=True) if not isinstance(entry, str)}
    if len(set(names)) == len(names):
        return KeyList(names, True, None, written)
    distinct = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return KeyList(list(distinct), True, [distinct[name] for name in names], written)


class WrittenKeys:
    """How the program last wrote the keys that are whole numbers. Inside the store a key is its decimal text."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def note(self, keys: KeyList) -> None:
        """The program has written these keys so."""
        if keys.written or self._numbers:
            for name in keys.names:
                number = keys.written.get(name)
                if number is not None:
                    self._numbers[name] = number
                elif name in self._numbers:
                    del self._numbers[name]

    def name(self, key: object) -> str:
        """The name of one key, which is noted. Raises NotAllowed if it is none."""
        name = key_name(key)
        self.note(KeyList([name], False, None, {} if isinstance(key, str) else {name: int(name)}))
        return name

    def of(self, name: str) -> str | int:
        """The key as the program wrote it."""
        return self._numbers.get(name, name)

    def restored(self, error: BaseException) -> BaseException:
        """The same error; the key in it, and in its text, is as the program wrote it."""
        if self._numbers and isinstance(error, RemoteError) and error.key in self._numbers:
            name, number = str(error.key), self._numbers[str(error.key)]
            error.key = number
            error.args = (str(error.args[0]).replace(repr(name), repr(number)), *error.args[1:])
        return error


def missing(name: str) -> KeyNotFound:
    """The error of a call on a key that nobody made."""
    return KeyNotFound(f"no key is called {name!r}: init it first", key=name)

"""Names of keys: one key, lists of keys, and what is not a key, alone or in a list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.keys import KeyList, WrittenKeys, key_list, key_name, missing
from kvd.errors import KeyNotFound, NotAllowed
from kvd.protocol.specs import MAX_KEY_CHARS


class Text(str):
    """A str of another type, as some libraries have them."""


NAMES: dict[str, tuple[Any, str]] = {
    "str": ("w", "w"),
    "str of another type": (Text("w"), "w"),
    "numpy str": (np.str_("w"), "w"),
    "int": (7, "7"),
    "negative int": (-7, "-7"),
    "numpy int": (np.int64(7), "7"),
    "numpy unsigned": (np.uint8(7), "7"),
    "other letters": ("κλειδί 🔑", "κλειδί 🔑"),
    "longest": ("k" * MAX_KEY_CHARS, "k" * MAX_KEY_CHARS),
}
NO_KEYS: dict[str, tuple[Any, str]] = {
    "None": (None, "is a str or an int, not NoneType"),
    "True": (True, "is a str or an int, not bool"),
    "False": (False, "is a str or an int, not bool"),
    "numpy bool": (np.bool_(True), "is a str or an int, not bool"),
    "float": (1.0, "is a str or an int, not float"),
    "numpy float": (np.float32(1), "is a str or an int, not float32"),
    "bytes": (b"w", "is a str or an int, not bytes"),
    "array of one number": (np.array(7), "is a str or an int, not ndarray"),
    "dict": ({"w": 1}, "is a str or an int, not dict"),
    "empty": ("", f"has 1 to {MAX_KEY_CHARS} characters, not 0"),
    "too long": ("k" * (MAX_KEY_CHARS + 1), f"has 1 to {MAX_KEY_CHARS} characters, not {MAX_KEY_CHARS + 1}"),
    "half a surrogate pair": ("\ud800", "is a text that UTF-8 can write"),
    "huge int": (10**5000, f"has 1 to {MAX_KEY_CHARS} characters, not thousands"),
    "long int": (10**MAX_KEY_CHARS, f"has 1 to {MAX_KEY_CHARS} characters, not {MAX_KEY_CHARS + 1}"),
}
NESTED: dict[str, Any] = {"list": ["w"], "tuple": ("w",), "empty list": [], "set": {"w"}}


@pytest.mark.parametrize("kind", NAMES)
def test_one_key_is_no_list(kind: str) -> None:
    key, name = NAMES[kind]
    assert key_name(key) == name
    assert key_list(key)[:2] == ([name], False)
    assert type(key_list(key)[0][0]) is str


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("kind", NAMES)
def test_a_key_in_a_list_has_the_same_name(kind: str, container: type[Any]) -> None:
    key, name = NAMES[kind]
    assert key_list(container([key]))[:3] == ([name], True, None)
    assert key_list(container(["first", key, 99]))[:3] == (["first", name, "99"], True, None)
    assert type(key_list(container([key]))[0][0]) is str


def test_an_empty_list_has_no_keys() -> None:
    assert key_list([]) == key_list(()) == KeyList([], True)


@pytest.mark.parametrize("kind", NO_KEYS)
def test_a_value_that_is_not_a_key_is_refused_alone_and_in_a_list(kind: str) -> None:
    wrong, text = NO_KEYS[kind]
    for key in (wrong, [wrong], (wrong,), ["first", wrong], [wrong, "last"]):
        with pytest.raises(NotAllowed, match=text):
            key_list(key)


@pytest.mark.parametrize("kind", NESTED)
def test_a_list_in_a_list_is_not_a_key(kind: str) -> None:
    name = type(NESTED[kind]).__name__
    with pytest.raises(NotAllowed, match=f"a key is a str or an int, not {name}"):
        key_list(["first", NESTED[kind]])


def test_a_key_that_is_in_a_list_twice_has_several_places() -> None:
    keys = key_list(["w", 7, "v", "7", "w"])
    assert keys == KeyList(["w", "7", "v"], True, [0, 1, 2, 1, 0], {"7": 7})
    assert keys.size == 5
    assert keys.by_name("abcde") == [["a", "e"], ["b", "d"], ["c"]]
    assert keys.by_place(keys.by_name("abcde")) == list("abcde")
    with pytest.raises(NotAllowed, match=r"the list names 7, 'w' more than once: init takes one value for each key"):
        keys.check_distinct("init")
    with pytest.raises(NotAllowed, match=r"the list names 7 more than once"):
        key_list([7, np.int64(7)]).check_distinct("init")
    key_list(["w", 7]).check_distinct("init")


def test_keys_are_given_back_as_they_were_written_last() -> None:
    written = WrittenKeys()
    written.note(key_list(["a", np.int64(7), -3]))
    assert [written.of(name) for name in ("a", "7", "-3", "8")] == ["a", 7, -3, "8"]
    assert type(written.of("7")) is int
    error = written.restored(KeyNotFound("no key is called '7', nor '77'", key="7"))
    assert (error.key, str(error)) == (7, "no key is called 7, nor '77'")  # type: ignore[attr-defined]
    written.note(key_list("7"))
    assert written.of("7") == "7"
    error = written.restored(KeyNotFound("no key is called '7'", key="7"))
    assert (error.key, str(error)) == ("7", "no key is called '7'")  # type: ignore[attr-defined]
    assert written.name(7) == "7"
    assert written.of("7") == 7


def test_an_error_names_the_value_as_the_caller_does() -> None:
    with pytest.raises(NotAllowed, match=r"^the head of a command is a str or an int, not float$"):
        key_name(1.0, "the head of a command")


def test_a_missing_key_is_named() -> None:
    error = missing("w")
    assert isinstance(error, KeyNotFound)
    assert error.key == "w"
    assert "'w'" in str(error)


def test_a_list_of_one_key_takes_and_gives_lists() -> None:
    with kvd.create("local") as kv:
        kv.init([7], [np.zeros(2, np.float32)])
        kv.push((np.int64(7),), [np.ones(2, np.float32)])
        (value,) = kv.pull([7])
        assert value.tolist() == kv.pull("7").tolist() == [1, 1]
        with pytest.raises(NotAllowed, match="a list of keys needs as many values in a list: 1, got a ndarray"):
            kv.push([7], np.ones(2, np.float32))
        values = {"7": np.ones(2, np.float32)}
        for lazy in (values.values(), iter(values.values())):
            with pytest.raises(NotAllowed, match=r"as many outs in a list: 1, got a \w+, not a list: pass list\(…\)"):
                kv.pull([7], out=lazy)
        for keys in (values.keys(), iter(values)):
            with pytest.raises(NotAllowed, match=r"keys are a list or a tuple, not \w+: pass list\(…\) of it"):
                kv.pull(keys)
        for wrong in ([7, True], [7, None], [7, ["w"]]):
            with pytest.raises(NotAllowed, match="a key is a str or an int"):
                kv.pull(wrong)
        assert kv.clock(7) == 1

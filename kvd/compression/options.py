"""Compression options of a program: a dict of plain values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvd.compression.registry import known_compressors
from kvd.compression.rules import Compressor
from kvd.errors import ConfigError
from kvd.optimizer.fields import count, kinds, number, require, shown

DEFAULT_MIN_BYTES = 64 << 10

DEFAULT_MU = 0.9

_OF_ALL = ("min_bytes", "ef", "momentum", "mu", "state_dir", "pull")


@dataclass(frozen=True, slots=True)
class Compression:
    """Compression of this worker's pushes.

    Attributes:
        min_bytes: values of fewer bytes are sent plain.
        feeds_back: what compression leaves of a push is added to the next one of the key (error feedback).
        mu: of Nesterov momentum, which every floating value gets first, also one that is sent plain; 0: none.
        state_dir: where a worker keeps what is left over, and the momentum, for itself after a restart; "": nowhere.
        pulls_encoded: the servers may encode what they merge of these pushes, too.
    """

    compressor: Compressor
    min_bytes: int = DEFAULT_MIN_BYTES
    feeds_back: bool = True
    mu: float = 0.0
    state_dir: str = ""
    pulls_encoded: bool = True


def parse(params: object) -> Compression | None:
    """Parse the argument of ``set_gradient_compression``. None stands for the type "none": no compression.

    Raises:
        ConfigError: it is no such dict. ``setting`` names the entry.
    """
    if not isinstance(params, Mapping):
        text = f'gradient compression is a dict such as {{"type": "2bit"}}, not {shown(params)}'
        raise ConfigError(text, setting="type")
    known = known_compressors()
    name = params.get("type")
    if not isinstance(name, str) or (name not in known and name != "none"):
        said = "no type is given" if "type" not in params else f"no compressor is called {shown(name)}"
        raise ConfigError(f"{said}; there are {', '.join(known)} and none", setting="type")
    given = {option: value for option, value in params.items() if option != "type"}
    if name == "none":
        _check_names(name, given, ())
        return None
    cls = known[name]
    _check_names(name, given, (*kinds(cls), *_OF_ALL))
    min_bytes = count("min_bytes", given.pop("min_bytes", DEFAULT_MIN_BYTES))
    require("min_bytes", min_bytes >= 0, "≥ 0", min_bytes)
    feeds_back = _is_chosen("ef", "vanilla", given.pop("ef")) if "ef" in given else cls.feeds_back
    mu = _mu(given)
    state_dir = _state_dir(given, is_kept=feeds_back or mu > 0)
    pulls_encoded = _is_chosen("pull", "encoded", given.pop("pull", "encoded"), "plain")
    return Compression(cls(**given), min_bytes, feeds_back, mu, state_dir, pulls_encoded)


def _is_chosen(option: str, choice: str, value: object, other: str = "none") -> bool:
    require(option, value in (choice, other), f'"{choice}" or "{other}"', value)
    return value == choice


def _mu(given: dict[object, object]) -> float:
    """Remove the options of momentum from the given ones, and return them."""
    if not _is_chosen("momentum", "nesterov", given.pop("momentum", "none")):
        require("mu", "mu" not in given, 'given with momentum "nesterov" only', given.get("mu"))
        return 0.0
    mu = number("mu", given.pop("mu", DEFAULT_MU))
    require("mu", 0 < mu < 1, "> 0 and < 1", mu)
    return mu


def _state_dir(given: dict[object, object], *, is_kept: bool) -> str:
    """Remove the state directory from the given options, and return it."""
    if "state_dir" not in given:
        return ""
    folder = given.pop("state_dir")
    require("state_dir", isinstance(folder, str | os.PathLike) and bool(os.fspath(folder)), "a directory", folder)
    require("state_dir", is_kept, "given with error feedback or momentum only: nothing else is kept", folder)
    assert isinstance(folder, str | os.PathLike)
    return os.fsdecode(folder)


def _check_names(name: str, given: Mapping[object, object], known: tuple[str, ...]) -> None:
    for option in given:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has no options"
            raise ConfigError(f"the compressor {name} has no option {shown(option)}: {has}", setting=str(option)[:80])

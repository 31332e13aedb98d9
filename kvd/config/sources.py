"""Sources of settings: the keyword or flag, the variable, the file, other launchers, the default.

`load` asks in this order: the keyword or flag, the ``KVD_*`` variable, the file, the variables of other launchers
(``DMLC_*``, ``RANK`` …), the default.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvd.config.addresses import tcp_address
from kvd.config.setting import Setting
from kvd.config.settings import Config, all_settings
from kvd.errors import ConfigError
from kvd.files import read_file

FILES: Final = (Path("kvd.toml"), Path("/etc/kvd/kvd.toml"))
"""Where `load` looks for a file when neither an argument nor ``KVD_CONFIG`` names one. It reads the first it finds."""

SHARED_VARIABLES: Final = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK"})
"""Fall-backs that programs other than launchers set, too: a text that the setting does not accept counts as not set."""

_EMPTY: Final[Mapping[str, object]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of `load`.

    Attributes:
        config: the settings.
        origin: for each setting ``"flag"`` (or what `load` was told), a variable, ``FILE:LINE`` or ``"default"``.
        notes: ``KVD_*`` variables that look like a misspelt setting, in words.
    """

    config: Config
    origin: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def is_given(self, setting: str) -> bool:
        """Return whether the value of a setting was given, or differs from the default."""
        return self.origin.get(setting, "default") != "default"

    def environment(self) -> dict[str, str]:
        """Like `Config.environment`, plus the values that were given and equal the default.

        A child reads the same file and variables as this process. A flag that restored a default here must win in the
        child, too.
        """
        given = [setting for setting in all_settings() if self.origin[setting.name] != "default"]
        return {setting.env: setting.show(getattr(self.config, setting.name)) for setting in given}


def load(
    overrides: Mapping[str, object] = _EMPTY,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    overrides_from: str = "flag",
) -> Loaded:
    """Find the value of every setting.

    Args:
        overrides: what was given as keywords or flags. ``None`` counts as not given, except for a setting that has
            ``None`` among its values.
        environ: the variables; ``None``: those of this process. An empty one counts as not set, except for a setting
            whose default is empty.
        file: the TOML file; ``None``: the one that ``KVD_CONFIG`` names, else the first of `FILES` that exists.
        overrides_from: what `Loaded.origin` calls the overrides.

    Raises:
        ConfigError: an unknown setting, a bad value, values that disagree, or a file that cannot be read.
    """
    environ = os.environ if environ is None else environ
    _refuse_unknown(overrides, overrides_from)
    from_file = _read_file(_find_file(environ, file))
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for setting in all_settings():
        raw, source = _look_up(setting, overrides, overrides_from, environ, from_file)
        origin[setting.name] = source
        values[setting.name] = raw if source == "default" else setting.parse(raw, source)
    try:
        config = Config(**values)
    except ConfigError as error:
        raise _with_origins(error, origin) from None
    return Loaded(config, MappingProxyType(origin), _notes(environ))


def _look_up(
    setting: Setting,
    overrides: Mapping[str, object],
    overrides_from: str,
    environ: Mapping[str, str],
    from_file: Mapping[str, tuple[object, str]],
) -> tuple[object, str]:
    """Return the value of one setting as given, and its origin."""
    if setting.name in overrides and (setting.optional or overrides[setting.name] is not None):
        return overrides[setting.name], overrides_from
    if setting.env in environ and (environ[setting.env].strip() or setting.default == ""):
        return environ[setting.env].strip(), setting.env
    if setting.name in from_file:
        return from_file[setting.name]
    if setting.name == "scheduler":
        return _dmlc_scheduler(environ) or (setting.default, "default")
    for name in setting.fallback:
        raw = environ.get(name, "").strip()
        if raw and (name not in SHARED_VARIABLES or setting.accepts(raw)):
            return raw, name
    return setting.default, "default"


def _dmlc_scheduler(environ: Mapping[str, str]) -> tuple[str, str] | None:
    host = environ.get("DMLC_PS_ROOT_URI", "").strip()
    port = environ.get("DMLC_PS_ROOT_PORT", "").strip()
    if not host and not port:
        return None
    if not host or not port:
        missing = "DMLC_PS_ROOT_PORT" if host else "DMLC_PS_ROOT_URI"
        raise ConfigError(
            f"half of the scheduler's address is set: set {missing} too, or KVD_SCHEDULER=tcp://HOST:PORT instead",
            setting="scheduler",
        )
    return tcp_address(host, port), "DMLC_PS_ROOT_URI"


def _find_file(environ: Mapping[str, str], file: Path | None) -> Path | None:
    if file is not None:
        return file
    if environ.get("KVD_CONFIG"):
        return Path(environ["KVD_CONFIG"])
    # Path.is_file would raise if the directory may not be searched
    return next((path for path in FILES if os.path.isfile(path)), None)


def _read_file(path: Path | None) -> dict[str, tuple[object, str]]:
    """Read the settings of a TOML file, each with ``FILE:LINE``."""
    if path is None:
        return {}
    import tomllib  # most programs have no file

    try:
        text = read_file(path).decode()
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror or error}") from None
    except ValueError as error:  # bad TOML, bad UTF-8, or an integer longer than Python reads
        raise ConfigError(f"cannot read the settings file {path} as TOML: {error}") from None
    found = {name: (value, f"{path}:{_line_of(name, text)}") for name, value in table.items()}
    for name, (_value, source) in found.items():
        _refuse_unknown({name: None}, source)
    return found


def _line_of(name: str, text: str) -> int:
    """Return the line on which a table or setting begins, from 1."""
    declaration = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[=.\]]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if declaration.match(line)), 1)


def _refuse_unknown(names: Mapping[str, object], source: str) -> None:
    known = {setting.name for setting in all_settings()}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "`kvd config show` lists the settings"
            raise ConfigError(f"{name} (from {source}) is not a setting: {hint}", setting=name)


def _notes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """List variables that look like misspelt settings: no errors, since other programs may own names with KVD_."""
    known = {setting.env for setting in all_settings()} | {"KVD_CONFIG"}
    strange = sorted(name for name in environ if name.startswith("KVD_") and name not in known)
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.85) for name in strange}
    return tuple(f"{name} is not a setting: did you mean {close[name][0]}?" for name in strange if close[name])


def _with_origins(error: ConfigError, origin: Mapping[str, str]) -> ConfigError:
    """Return the error with the origins of the settings that it names."""
    text = str(error)
    given = [f"{n} from {o}" for n, o in origin.items() if o != "default" and re.search(rf"\b{n}\b", text)]
    return ConfigError(f"{text} ({', '.join(given)})" if given else text, setting=error.setting)

"""The settings: each is declared once, as a field of `Config`, and this is the only place that reads the environment.

A setting has one name in three spellings: ``slice_bytes`` as a keyword and in the file, ``--slice-bytes`` as a flag,
``KVD_SLICE_BYTES`` as a variable. `load` asks, in this order: the keyword or flag, the ``KVD_*`` variable, the file,
the variables of other launchers (``DMLC_*``, ``RANK`` …), the default.

Sizes are whole bytes, or numbers with ``KiB``, ``MiB``, ``GiB`` (``8M`` is ``8MiB``: powers of 1024 only).
Durations are seconds, or numbers with ``ms``, ``s``, ``m``, ``h``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TextIO, cast

from kvd.errors import ConfigError

KiB: Final = 1 << 10
MiB: Final = 1 << 20

Kind = Literal["text", "boolean", "integer", "size", "duration"]
Role = Literal["scheduler", "server", "worker"]
Value = str | int | float | bool | None

ROLES: Final[tuple[Role, ...]] = ("scheduler", "server", "worker")
MOST_NODES: Final = 200
"""Servers and workers of one cluster: what one announcement can name."""

FILES: Final = (Path("kvd.toml"), Path("/etc/kvd/kvd.toml"))
"""Where `load` looks for a file when neither an argument nor ``KVD_CONFIG`` names one. The first that exists counts."""

_EMPTY: Final[Mapping[str, object]] = MappingProxyType({})
_SIZE_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*(ms|s|m|h)?", re.IGNORECASE)
_BOOLEANS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_ACCEPTED: Final[dict[Kind, str]] = {
    "text": "text",
    "boolean": "true or false (also 1 0, yes no, on off)",
    "integer": "a whole number",
    "size": "a whole number of bytes, or a number with KiB, MiB or GiB, such as 512KiB",
    "duration": "seconds, or a number with ms, s, m or h, such as 500ms",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known about one setting; the command line makes its flags from these.

    Attributes:
        name: the field of `Config`, and the key in the file.
        kind: how its text is read.
        optional: whether ``none`` (``None``) is a value of it.
        help: one sentence, without a full stop.
        unit: ``"bytes"``, ``"s"`` or empty.
        choices: the texts that are accepted; empty if any is.
        minimum: the smallest number that is accepted, in its unit.
        maximum: the largest, in its unit.
        used_by: the roles that act on it; none: whoever starts them.
        fallback: variables of other launchers that are asked before the default.
        default: its value when nobody gives one.
    """

    name: str
    kind: Kind
    optional: bool
    help: str
    unit: str
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    used_by: tuple[Role, ...]
    fallback: tuple[str, ...]
    default: Value

    @property
    def env(self) -> str:
        """The environment variable, such as ``KVD_SLICE_BYTES``."""
        return f"KVD_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The flag of the command line, such as ``--slice-bytes``."""
        return f"--{self.name.replace('_', '-')}"

    def parse(self, raw: object, origin: str = "keyword") -> Value:
        """Read a value of this setting from text, or check one that has its type already.

        Args:
            raw: what was given.
            origin: where it was given, for the error.

        Raises:
            ConfigError: it is no value of this setting; the text says what is.
        """
        if self.optional and (raw is None or (isinstance(raw, str) and raw.strip().lower() == "none")):
            return None
        value = _READERS[self.kind](raw)
        if value is None or not self._in_range(value):
            raise ConfigError(f"{self.name} = {raw!r} (from {origin}): expected {self.accepted()}", setting=self.name)
        return value

    def accepted(self) -> str:
        """What this setting accepts, in words."""
        if self.choices:
            return " or ".join(choice or "nothing" for choice in self.choices)
        words = _ACCEPTED[self.kind]
        if self.minimum is not None and self.maximum is not None:
            words += f", from {self.show(self.minimum)} to {self.show(self.maximum)}"
        elif self.minimum is not None:
            words += f", at least {self.show(self.minimum)}"
        return words + (", or none" if self.optional else "")

    def show(self, value: Value) -> str:
        """The text of a value. `parse` reads it back to the same value."""
        if value is None:
            return "none"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, str):
            return value
        if self.kind == "size":
            return _size_text(int(value))
        if self.kind == "integer":
            return str(value)
        number = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return f"{number}s" if self.kind == "duration" else number

    def _in_range(self, value: str | int | float | bool) -> bool:
        if isinstance(value, str):
            return not self.choices or value in self.choices
        return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)


def _setting(
    default: Value,
    help: str,  # noqa: A002 - the name that it has in Setting
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    used_by: tuple[Role, ...] = ROLES,
    fallback: tuple[str, ...] = (),
) -> Any:
    """Declare a field of `Config`."""
    metadata = {
        "help": help,
        "unit": unit,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "used_by": used_by,
        "fallback": fallback,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one process, checked. An instance that exists is consistent.

    Values may be given as text (``slice_bytes="1MiB"``); the fields hold numbers.

    Raises:
        ConfigError: a value is wrong, or two disagree; ``.setting`` names the one to change.
    """

    # Where things are
    scheduler: str = _setting(
        "tcp://127.0.0.1:9191",
        "where the scheduler is: tcp://HOST:PORT or ipc://PATH",
        fallback=("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"),
    )
    bind: str = _setting(
        "",
        "where this daemon listens; nothing: any free port of 127.0.0.1, and the scheduler at its own address",
        used_by=("scheduler", "server"),
    )
    node_id: str = _setting("", "the name of this node, by which it takes up its rank again after a restart")
    keyfile: str = _setting("", "a readable file with the keys of this node")
    state_dir: str = _setting("", "where state that survives a restart is kept", used_by=("scheduler", "server"))
    insecure: bool = _setting(
        False, "listen on other addresses than loopback without keys", used_by=("scheduler", "server")
    )

    # The cluster
    num_workers: int = _setting(
        0, "workers in the job; 0: whatever the cluster has", minimum=0, fallback=("DMLC_NUM_WORKER", "WORLD_SIZE")
    )
    num_servers: int = _setting(
        0, "servers in the job; 0: whatever the cluster has", minimum=0, fallback=("DMLC_NUM_SERVER",)
    )
    replicas: int = _setting(1, "copies of every value", minimum=1, maximum=2)
    num_shards: int = _setting(840, "placement slots", minimum=1, maximum=4096)
    merge: str = _setting("sum", "how contributions are merged", choices=("sum", "mean", "weighted"))
    staleness: int | None = _setting(
        None, "how many clocks a worker may be ahead of the slowest in dist_async; none: any number", minimum=0
    )
    rounds_ahead: int = _setting(2, "rounds that a worker may be ahead of the open one in dist_sync", minimum=1)

    # Moving and keeping bytes
    slice_bytes: int = _setting(
        4 * MiB,
        "the largest slice of a value, a multiple of 64; unless it is given, less with several servers",
        unit="bytes",
        minimum=4 * KiB,
        maximum=16 * MiB,
    )
    credit_bytes: int = _setting(
        32 * MiB, "bytes in flight to each server", unit="bytes", minimum=4 * KiB, used_by=("server", "worker")
    )
    memory_limit_bytes: int = _setting(
        0,
        "the memory that a daemon may take; 0: three quarters of the machine's",
        unit="bytes",
        minimum=0,
        used_by=("server", "worker"),
    )
    shared_memory: str = _setting(
        "auto", "shared memory between processes of one host", choices=("auto", "off"), used_by=("server", "worker")
    )
    check_bound: bool = _setting(
        False, "report gradients of kv.bind that are written to before their push is done", used_by=("worker",)
    )
    cpu_affinity: str = _setting(
        "off",
        "whether a launcher gives each server a core of its own, if the workers keep one each",
        choices=("off", "auto"),
        used_by=(),
    )

    # Liveness and deadlines
    heartbeat_interval_s: float = _setting(1.0, "time between two heartbeats", unit="s", minimum=0.01)
    server_timeout_s: float = _setting(5.0, "silence after which a server is dead", unit="s", minimum=0.02)
    worker_timeout_s: float = _setting(20.0, "silence after which a worker is dead", unit="s", minimum=0.02)
    request_timeout_s: float = _setting(60.0, "the deadline of a call that names none", unit="s", minimum=0.02)
    on_worker_loss: str = _setting(
        "fail", "what becomes of calls that wait for a dead worker", choices=("wait", "fail", "shrink")
    )

    # Watching
    metrics_bind: str = _setting("", "HOST:PORT of the metrics page; nothing: no page")
    log_format: str = _setting(
        "auto", "the format of the log; auto: text on a terminal, else json", choices=("auto", "text", "json")
    )
    log_level: str = _setting(
        "info", "the least serious level that is logged", choices=("debug", "info", "warning", "error")
    )

    # This process
    preferred_rank: int | None = _setting(
        None, "the rank to ask for", minimum=0, used_by=("worker",), fallback=("RANK",)
    )
    local_rank: int = _setting(
        0, "the number of this worker on its host", minimum=0, used_by=("worker",), fallback=("LOCAL_RANK",)
    )
    role: str = _setting("", "what this process is", choices=("", *ROLES), fallback=("DMLC_ROLE",))
    parent_pid: int = _setting(0, "the process whose end ends this one; 0: none", minimum=0)

    def __post_init__(self) -> None:
        for setting in settings():
            object.__setattr__(self, setting.name, setting.parse(getattr(self, setting.name)))
        for name, problem in _problems(self):
            raise ConfigError(problem, setting=name)

    def listen_address(self, role: Role) -> str:
        """Where a daemon of this role listens: `bind`, or the default of the role."""
        return self.bind or (self.scheduler if role == "scheduler" else "tcp://127.0.0.1:0")

    def check_role(self, role: Role) -> None:
        """Check what only a daemon of this role needs.

        Raises:
            ConfigError: the scheduler was not told the size of the cluster, or a larger one than it can announce.
        """
        if role != "scheduler":
            return
        for name in ("num_workers", "num_servers"):
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{name} = 0: the scheduler needs the number; give {flag} N, N ≥ 1", setting=name)
        if self.num_workers + self.num_servers > MOST_NODES:
            raise ConfigError(
                f"num_workers = {self.num_workers} and num_servers = {self.num_servers}: a cluster has at most "
                f"{MOST_NODES} nodes in all",
                setting="num_workers",
            )

    def check_exposure(self, address: str) -> None:
        """Refuse to listen where strangers can connect, unless that was asked for.

        Args:
            address: where a daemon is about to listen.

        Raises:
            ConfigError: it is not this host only, and `insecure` is not set.
        """
        if self.insecure or parse_address(address).is_local:
            return
        # Connections are not encrypted yet, with or without keys: a key file alone must not open the door.
        keys = "the keyfile does not protect connections in this version; " if self.keyfile else ""
        raise ConfigError(
            f"{address} can be reached from other machines, and nothing checks who connects: {keys}"
            f"listen on 127.0.0.1, or give --insecure (KVD_INSECURE=1) if the network is trusted",
            setting="insecure",
        )

    def memory_bound_bytes(self) -> int:
        """The memory that a daemon may take, in bytes: `memory_limit_bytes`, or three quarters of what there is."""
        return self.memory_limit_bytes or machine_memory_bytes() * 3 // 4

    def slice_bytes_for(self, num_servers: int, *, given: bool) -> int:
        """The slices of a cluster with so many servers: `slice_bytes` if it was `given`, else that much for all servers
        together, at least 512 KiB each, so that a model spreads evenly over many servers."""
        if given:
            return self.slice_bytes
        return max(self.slice_bytes // max(1, num_servers), 512 * KiB) & -64

    def environment(self) -> dict[str, str]:
        """The ``KVD_*`` variables that give a child process the values that are not the default.

        What belongs to this process only (`node_id`, `bind`, `role`, the ranks, `parent_pid`) is among them: whoever
        starts several children sets those for each.
        """
        changed = [setting for setting in settings() if getattr(self, setting.name) != setting.default]
        return {setting.env: setting.show(getattr(self, setting.name)) for setting in changed}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` found.

    Attributes:
        config: the settings.
        origin: for each setting ``"flag"`` (or what `load` was told), a variable, ``FILE:LINE`` or ``"default"``.
        notes: ``KVD_*`` variables that look like a misspelt setting, in words.
    """

    config: Config
    origin: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Like `Config.environment`, with the values that were given and equal the default.

        A child reads the same file and the same variables as this process; a flag that set a value back to its
        default must win there too.
        """
        given = [setting for setting in settings() if self.origin[setting.name] != "default"]
        return {setting.env: setting.show(getattr(self.config, setting.name)) for setting in given}


@functools.cache
def settings() -> tuple[Setting, ...]:
    """All settings, in the order of their declaration."""
    return tuple(
        Setting(
            name=field.name,
            kind=_kind(field),
            optional="None" in str(field.type),
            default=cast(Value, field.default),
            **field.metadata,
        )
        for field in dataclasses.fields(Config)
    )


def _kind(field: dataclasses.Field[Any]) -> Kind:
    if field.metadata["unit"] == "bytes":
        return "size"
    if field.metadata["unit"] == "s":
        return "duration"
    kinds: dict[str, Kind] = {"str": "text", "bool": "boolean", "int": "integer", "int | None": "integer"}
    return kinds[str(field.type)]


# --- loading ---------------------------------------------------------------------------------------------------------


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
    for setting in settings():
        raw, source = _lookup(setting, overrides, overrides_from, environ, from_file)
        origin[setting.name] = source
        values[setting.name] = raw if source == "default" else setting.parse(raw, source)
    try:
        config = Config(**values)
    except ConfigError as error:
        raise _with_origins(error, origin) from None
    return Loaded(config, MappingProxyType(origin), _notes(environ))


def _lookup(
    setting: Setting,
    overrides: Mapping[str, object],
    overrides_from: str,
    environ: Mapping[str, str],
    from_file: Mapping[str, tuple[object, str]],
) -> tuple[object, str]:
    """The value of one setting as it was given, and where."""
    if setting.name in overrides and (setting.optional or overrides[setting.name] is not None):
        return overrides[setting.name], overrides_from
    if setting.env in environ and (environ[setting.env].strip() or setting.default == ""):
        return environ[setting.env].strip(), setting.env
    if setting.name in from_file:
        return from_file[setting.name]
    if setting.name == "scheduler":
        return _dmlc_scheduler(environ) or (setting.default, "default")
    for name in setting.fallback:
        if environ.get(name, "").strip():
            return environ[name].strip(), name
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
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}", "DMLC_PS_ROOT_URI"


def _find_file(environ: Mapping[str, str], file: Path | None) -> Path | None:
    if file is not None:
        return file
    if environ.get("KVD_CONFIG"):
        return Path(environ["KVD_CONFIG"])
    # Path.is_file would raise where the folder may not be searched
    return next((path for path in FILES if os.path.isfile(path)), None)


def _read_file(path: Path | None) -> dict[str, tuple[object, str]]:
    """The settings of a TOML file, each with ``FILE:LINE``."""
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror or error}") from None
    except ValueError as error:  # of TOML or of UTF-8
        raise ConfigError(f"the settings file {path} is not TOML: {error}") from None
    found = {name: (value, f"{path}:{_line_of(name, text)}") for name, value in table.items()}
    for name, (_value, source) in found.items():
        _refuse_unknown({name: None}, source)
    return found


def _line_of(name: str, text: str) -> int:
    """The line on which a file's table or setting begins, from 1."""
    declaration = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[=.\]]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if declaration.match(line)), 1)


def _refuse_unknown(names: Mapping[str, object], source: str) -> None:
    known = {setting.name for setting in settings()}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "`kvd config show` lists the settings"
            raise ConfigError(f"{name} (from {source}) is no setting: {hint}", setting=name)


def _notes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that are nearly a setting's. They are no errors: other programs may own names that begin with KVD_."""
    known = {setting.env for setting in settings()} | {"KVD_CONFIG"}
    strange = sorted(name for name in environ if name.startswith("KVD_") and name not in known)
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.85) for name in strange}
    return tuple(f"{name} is no setting: did you mean {close[name][0]}?" for name in strange if close[name])


def _with_origins(error: ConfigError, origin: Mapping[str, str]) -> ConfigError:
    """The same error, saying where the settings that it names were given."""
    text = str(error)
    given = [f"{n} from {o}" for n, o in origin.items() if o != "default" and re.search(rf"\b{n}\b", text)]
    return ConfigError(f"{text} ({', '.join(given)})" if given else text, setting=error.setting)


# --- reading values --------------------------------------------------------------------------------------------------
# Each reader returns None for what it cannot read: its caller knows the setting and its origin, and raises.


def _read_text(raw: object) -> str | None:
    text = os.fspath(raw) if isinstance(raw, os.PathLike) else raw
    return text.strip() if isinstance(text, str) and "\0" not in text else None


def _read_boolean(raw: object) -> bool | None:
    if isinstance(raw, bool):
        return raw
    return _BOOLEANS.get(raw.strip().lower()) if isinstance(raw, str) else None


def _read_integer(raw: object) -> int | None:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    return int(raw) if isinstance(raw, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", raw) else None


def _read_size(raw: object) -> int | None:
    match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        return None if isinstance(raw, str) else _read_integer(raw)
    unit = _SIZE_UNITS[(match[2] or "").upper()]
    if "." not in match[1]:
        return int(match[1]) * unit if len(match[1]) <= 18 else None
    size = float(match[1]) * unit
    return int(size) if size.is_integer() else None


def _read_duration(raw: object) -> float | None:
    if isinstance(raw, str):
        match = _DURATION.fullmatch(raw.strip())
        if match is None:
            return None
        number = float(match[1])
        unit = (match[2] or "s").lower()
        # a division keeps 300ms the same number as 0.3, which a multiplication by 0.001 would not promise
        seconds = number / 1000 if unit == "ms" else number * {"s": 1, "m": 60, "h": 3600}[unit]
    elif isinstance(raw, int | float) and not isinstance(raw, bool):
        seconds = float(raw)
    else:
        return None
    return seconds if math.isfinite(seconds) else None


_READERS: Final = {
    "text": _read_text,
    "boolean": _read_boolean,
    "integer": _read_integer,
    "size": _read_size,
    "duration": _read_duration,
}


def _size_text(size: int) -> str:
    for suffix, unit in (("GiB", 1 << 30), ("MiB", MiB), ("KiB", KiB)):
        if size and size % unit == 0:
            return f"{size // unit}{suffix}"
    return str(size)


# --- values that must agree ------------------------------------------------------------------------------------------


def _problems(config: Config) -> Iterator[tuple[str, str]]:
    """What is wrong between settings: the one to change, and what to do."""
    yield from _address_problems(config)
    yield from _size_problems(config)
    yield from _time_problems(config)
    if config.replicas == 2:
        yield (
            "replicas",
            "replicas = 2: this version keeps one copy of every value; set replicas = 1 and save checkpoints with the "
            "program",
        )
    if config.on_worker_loss == "shrink":
        yield "on_worker_loss", "on_worker_loss = shrink is not available in this version: set it to fail or wait"
    if config.node_id and not re.fullmatch(r"[!-~]{1,128}", config.node_id):
        yield "node_id", f"node_id = {config.node_id!r}: use up to 128 printable ASCII characters without spaces"
    if config.keyfile and not (os.path.isfile(config.keyfile) and os.access(config.keyfile, os.R_OK)):
        yield "keyfile", f"keyfile = {config.keyfile!r} is not a file that this process may read: check path and owner"


def _address_problems(config: Config) -> Iterator[tuple[str, str]]:
    for name in ("scheduler", "bind"):
        text = getattr(config, name)
        try:
            address = parse_address(text) if text or name == "scheduler" else None
        except ConfigError as error:
            yield name, f"{name} = {text!r}: {error}"
            return
        if name == "scheduler" and address is not None and address.scheme == "tcp":
            if address.port == 0:
                yield name, f"scheduler = {text!r}: nobody can find port 0; name the port, or give port 0 to bind"
            if address.is_wildcard:
                yield (
                    name,
                    f"scheduler = {text!r}: name the address that others connect to; {text} can be given to bind",
                )
    if config.metrics_bind:
        try:
            _host_and_port(config.metrics_bind)
        except ConfigError as error:
            yield "metrics_bind", f"metrics_bind = {config.metrics_bind!r}: {error}"


def _size_problems(config: Config) -> Iterator[tuple[str, str]]:
    if config.slice_bytes % 64:
        better = max(4 * KiB, config.slice_bytes // 64 * 64)
        yield "slice_bytes", f"slice_bytes = {config.slice_bytes} is not a multiple of 64: {better} is"
    if config.credit_bytes < config.slice_bytes:
        yield (
            "credit_bytes",
            f"credit_bytes = {_size_text(config.credit_bytes)} does not let one slice through: "
            f"set it to slice_bytes = {_size_text(config.slice_bytes)} or more",
        )
    if 0 < config.memory_limit_bytes < config.credit_bytes:
        yield (
            "memory_limit_bytes",
            f"memory_limit_bytes = {_size_text(config.memory_limit_bytes)} is less than one worker may have in flight: "
            f"set it to credit_bytes = {_size_text(config.credit_bytes)} or more, or to 0 for the default",
        )


def _time_problems(config: Config) -> Iterator[tuple[str, str]]:
    beat = config.heartbeat_interval_s
    for name in ("server_timeout_s", "worker_timeout_s"):
        limit = getattr(config, name)
        if limit < 2 * beat:
            yield (
                name,
                f"{name} = {limit:g} would take one late heartbeat for a death: set it to {2 * beat:g} or more "
                f"(two heartbeats, heartbeat_interval_s = {beat:g})",
            )
        if config.request_timeout_s <= limit + beat:
            yield (
                "request_timeout_s",
                f"request_timeout_s = {config.request_timeout_s:g} ends before a death is known: set it to more than "
                f"{limit + beat:g} ({name} + heartbeat_interval_s)",
            )


# --- addresses -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """An address that sockets listen on or connect to.

    Attributes:
        scheme: ``"tcp"`` or ``"ipc"``.
        host: of tcp; a name or a number, IPv6 without brackets.
        port: of tcp; 0 is any free port.
        path: of ipc; one that begins with ``@`` is an abstract name.
    """

    scheme: Literal["tcp", "ipc"]
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of the machine."""
        return self.scheme == "tcp" and self.host in ("*", "0.0.0.0", "::")

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        if self.scheme == "ipc" or self.host in ("localhost", "lo"):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name may mean anything tomorrow

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``tcp://HOST:PORT``, ``tcp://[IPV6]:PORT`` or ``ipc://PATH``.

    Raises:
        ConfigError: it is none of these.
    """
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "tcp":
        host, port = _host_and_port(rest)
        return Address("tcp", host=host, port=port)
    if separator and scheme == "ipc":
        # 107 bytes and a zero byte are what the kernel has room for
        if 0 < len(os.fsencode(rest)) <= 107 and "\0" not in rest:
            return Address("ipc", path=rest)
        raise ConfigError("the path after ipc:// must have 1 to 107 bytes")
    raise ConfigError("an address is tcp://HOST:PORT or ipc://PATH")


def _host_and_port(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9A-Za-z.%_-]*:[0-9A-Za-z:.%_-]*)\]|([0-9A-Za-z_.*-]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ConfigError("expected HOST:PORT with a port from 0 to 65535 (an IPv6 host in brackets)")
    return match[1] or match[2], int(match[3])


# --- the rest of the environment -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SystemdEnvironment:
    """What systemd tells a service of ``Type=notify``.

    Attributes:
        notify_socket: path of the socket, or ``@`` and its abstract name; empty if nobody listens.
        watchdog_usec: microseconds after which a silent service is killed; 0 if it is not watched.
    """

    notify_socket: str = ""
    watchdog_usec: int = 0


def systemd_environment(environ: Mapping[str, str] | None = None, *, pid: int | None = None) -> SystemdEnvironment:
    """Read ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``. What cannot be read counts as not given.

    Args:
        environ: the variables; ``None``: those of this process.
        pid: the process that asks; ``None``: this one. A watchdog that was set up for another process is not its own.
    """
    environ = os.environ if environ is None else environ
    usec = _read_integer(environ.get("WATCHDOG_USEC", "")) or 0
    watched = environ.get("WATCHDOG_PID", "").strip()
    if watched and watched != str(os.getpid() if pid is None else pid):
        usec = 0
    socket = environ.get("NOTIFY_SOCKET", "")
    return SystemdEnvironment(socket if socket[:1] in ("/", "@") else "", max(0, usec))


def child_environment(changes: Mapping[str, str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for a child process: those of this one with `changes`, without what systemd told this one only."""
    environ = os.environ if environ is None else environ
    own = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    return {name: value for name, value in environ.items() if name not in own} | dict(changes)


def terminal_colour(environ: Mapping[str, str] | None, stream: TextIO | None) -> bool:
    """Whether to write colours to a stream: a terminal that can show them, and no ``NO_COLOR``.

    Args:
        environ: the variables; ``None``: those of this process.
        stream: where the text goes; ``None``, which is what Python has for a closed one: nowhere.
    """
    environ = os.environ if environ is None else environ
    if stream is None or stream.closed or environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def machine_memory_bytes(*, cgroup: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory of this machine, or of the control group that this process is confined to, in bytes.

    Args:
        cgroup: the file that names the group of this process.
        groups: the folder in which groups are folders.
    """
    smallest = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        inside = groups / cgroup.read_text(encoding="ascii").strip().removeprefix("0::").lstrip("/")
    except (OSError, ValueError):
        return smallest
    for folder in (inside, *inside.parents):
        if not folder.is_relative_to(groups):
            break
        try:
            smallest = min(smallest, int((folder / "memory.max").read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # no limit here ("max"), or no such file
    return smallest

"""The options: those that all commands share, and one flag for each setting, made from its declaration."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click
from click.shell_completion import CompletionItem

from kvd.config import Config, Loaded, Role, Setting, all_settings, load, named_setting
from kvd.errors import ConfigError
from kvd.observe import log

_META: Final = "kvd_cli.options"
_PREFIX: Final = "common_"
"""What the names of the common options begin with in click, where a command may have a ``file`` of its own."""

_SHORT: Final = {"scheduler": "-S"}
OF_ONE_PROCESS: Final = ("bind", "node_id", "preferred_rank", "local_rank", "role", "parent_pid")
"""Settings that several processes never share."""

Output = Literal["table", "json"]
Command = TypeVar("Command", bound=Callable[..., Any])

if TYPE_CHECKING:
    _ParamType = click.ParamType[object]
else:  # older versions of click cannot be subscripted
    _ParamType = click.ParamType

_log = logging.getLogger(__name__)


@dataclass
class Options:
    """What the options said, of the group and of the command; the command's win.

    Attributes:
        settings: name of a setting → its text, for each flag that was given.
        file: of ``--config``.
        timeout_s: of ``--timeout``.
        output: the format of the data on stdout.
        verbose: whether ``-v`` was given.
        loaded: what `load` found last.
    """

    settings: dict[str, object] = dataclasses.field(default_factory=dict)
    file: Path | None = None
    timeout_s: float | None = None
    output: Output = "table"
    verbose: bool = False
    loaded: Loaded | None = None

    def load(self) -> Loaded:
        """The settings of this process, with warnings about variables that look like misspelt ones.

        Raises:
            ConfigError: a setting is wrong.
        """
        loaded = self._load()
        for note in loaded.notes:
            _log.warning("%s", note)
        return loaded

    def load_silently(self) -> Loaded:
        """The settings of a daemon, which tells its notes itself, in its log."""
        self._use_timeout()
        return self._load()

    def load_daemon(self) -> Loaded:
        """The settings of a job; ``--timeout`` is the deadline of its calls."""
        self._use_timeout()
        return self.load()

    def _load(self) -> Loaded:
        overrides = dict(self.settings)
        if self.verbose:
            overrides.setdefault("log_level", "debug")
        self.loaded = load(overrides, file=self.file)
        return self.loaded

    def _use_timeout(self) -> None:
        if self.timeout_s is not None:
            self.settings.setdefault("request_timeout_s", self.timeout_s)

    def load_client(self) -> Loaded:
        """The settings of a command that asks a cluster something, with ``--timeout`` as its deadline.

        Such a command says little: warnings and worse, unless it was told otherwise.
        """
        loaded = self.load()
        quiet = loaded.origin["log_level"] == "default"
        log.configure(loaded.config.log_format, "warning" if quiet else loaded.config.log_level, "kvd")
        if self.timeout_s is None:
            return loaded
        config = with_deadline(loaded.config, self.timeout_s)
        changed = {s.name for s in all_settings() if getattr(config, s.name) != getattr(loaded.config, s.name)}
        return Loaded(config, {**loaded.origin, **dict.fromkeys(changed, "--timeout")}, loaded.notes)


def current() -> Options:
    """The options of the command that runs."""
    return _options(click.get_current_context())


def is_verbose(ctx: click.Context) -> bool:
    """Whether ``-v`` was given."""
    return _options(ctx).verbose


def _options(ctx: click.Context) -> Options:
    options = ctx.meta.setdefault(_META, Options())  # shared by the contexts of group and command
    assert isinstance(options, Options)
    return options


def with_deadline(config: Config, timeout_s: float) -> Config:
    """The settings of a short-lived client with this deadline.

    A deadline has to be longer than it takes to find a death. This process declares nobody dead, so its own idea of
    that shrinks with the deadline; the cluster's stays what it is.
    """
    beat_s = min(config.heartbeat_interval_s, timeout_s / 8)
    return dataclasses.replace(
        config,
        request_timeout_s=timeout_s,
        heartbeat_interval_s=beat_s,
        server_timeout_s=min(config.server_timeout_s, timeout_s / 2),
        worker_timeout_s=min(config.worker_timeout_s, timeout_s / 2),
    )


class SettingType(_ParamType):
    """A value of a setting, kept as its text: `kvd.config.load` reads it again, together with all others."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.name = setting.name
        self.metavar = "|".join(setting.choices) if setting.choices else setting.kind.upper()

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What the help shows for the value."""
        return self.metavar

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """The value, if the setting accepts it."""
        try:
            self._setting.parse(value, "flag")
        except ConfigError:
            self.fail(f"{value!r}: expected {self._setting.accepted()}", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The choices that begin so."""
        return [CompletionItem(choice) for choice in self._setting.choices if choice and choice.startswith(incomplete)]


def setting_options(
    *, role: Role | None = None, leave_out: Iterable[str] = (), short: dict[str, str] | None = None
) -> Callable[[Command], Command]:
    """A flag for each setting that processes of a role act on.

    Args:
        role: which; None: all settings.
        leave_out: names of settings that get no flag.
        short: further spellings, such as ``{"num_workers": "-n"}``.
    """
    left_out = {*leave_out, "scheduler"}  # the common options have it
    chosen = [s for s in all_settings() if s.name not in left_out and (role is None or role in s.used_by)]

    def decorate(command: Command) -> Command:
        for setting in reversed(chosen):
            command = _setting_option(setting, *([short[setting.name]] if short and setting.name in short else []))(
                command
            )
        return command

    return decorate


def _setting_option(setting: Setting, *short: str) -> Callable[[Command], Command]:
    default = setting.show(setting.default)
    text = f"{setting.help}  [{setting.env}; default: {default}]" if default else f"{setting.help}  [{setting.env}]"
    if setting.kind == "boolean":
        return click.option(
            f"{setting.flag}/--no-{setting.flag[2:]}", setting.name, default=None, help=text,
            expose_value=False, callback=_store_setting,
        )  # fmt: skip
    return click.option(
        setting.flag, *short, setting.name, type=SettingType(setting), default=None, help=text,
        expose_value=False, callback=_store_setting,
    )  # fmt: skip


def _store_setting(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None and param.name is not None:
        _options(ctx).settings[param.name] = value


def common_options(*, output_flags: Sequence[str] = ("-o", "--output")) -> Callable[[Command], Command]:
    """The options that every command has.

    Args:
        output_flags: what the format of the output is called, where ``-o`` is something else.
    """
    scheduler = named_setting("scheduler")
    timeout = named_setting("request_timeout_s")
    decorators = [
        _setting_option(scheduler, _SHORT["scheduler"]),
        _common(*output_flags, name="output", type=click.Choice(["table", "json"]), help="the format of what is shown"),
        _common("--timeout", name="timeout_s", type=SettingType(timeout), help="how long to wait, such as 5s"),
        _common(
            "--config", name="file", type=click.Path(path_type=Path, dir_okay=False),
            help="the file with settings  [KVD_CONFIG; default: kvd.toml, /etc/kvd/kvd.toml]",
        ),
        _common("-v", "--verbose", name="verbose", is_flag=True, help="log everything; show where an error came from"),
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def _common(*flags: str, name: str, **attributes: Any) -> Callable[[Command], Command]:
    return click.option(*flags, _PREFIX + name, default=None, expose_value=False, callback=_store_common, **attributes)


def _store_common(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is None or param.name is None:
        return
    name = param.name.removeprefix(_PREFIX)
    if name == "timeout_s":
        timeout = named_setting("request_timeout_s")
        value = timeout.parse(value, "--timeout")
    setattr(_options(ctx), name, value)

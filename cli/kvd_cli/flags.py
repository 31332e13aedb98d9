"""Flags: those that all commands share, and one for each setting, made from its declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from kvd.config import Role, Setting, all_settings, named_setting
from kvd.errors import ConfigError
from kvd_cli.options import OUTPUT_FORMATS, options_of

_PREFIX: Final = "common_"
"""What the names of the common options begin with in click: a command may have a ``file`` of its own."""

_COMMON_SETTINGS: Final = {"scheduler": ("-S",), "job": (), "keyfile": (), "insecure": ()}
"""The settings that every command has a flag for, with further spellings."""

NO_CLUSTER: Final = ("scheduler", "job", "insecure", "timeout_s")
"""Common options that change nothing in a command that asks no cluster."""

Command = TypeVar("Command", bound=Callable[..., Any])

if TYPE_CHECKING:
    _ParamType = click.ParamType[object]
else:  # older versions of click cannot be subscripted
    _ParamType = click.ParamType


class SettingType(_ParamType):
    """Parameter type of a setting. The value stays text, because `kvd.config.load` parses all settings together."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.name = setting.name
        self.metavar = "|".join(setting.choices) if setting.choices else setting.kind.upper()

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the placeholder of the value in the help."""
        return self.metavar

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Return the value, if the setting accepts it."""
        try:
            self._setting.parse(value, "flag")
        except ConfigError:
            self.fail(f"{value!r}: expected {self._setting.accepted()}", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the choices that begin with the typed text."""
        return [CompletionItem(choice) for choice in self._setting.choices if choice and choice.startswith(incomplete)]


def setting_options(
    *, role: Role | None = None, leave_out: Iterable[str] = (), short: dict[str, str] | None = None
) -> Callable[[Command], Command]:
    """Return a flag for each setting that processes of a role act on.

    Args:
        role: the role; None selects all settings.
        leave_out: settings that get no flag.
        short: further spellings, such as ``{"num_workers": "-n"}``.
    """
    left_out = {*leave_out, *_COMMON_SETTINGS}
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
        options_of(ctx).settings[param.name] = value


def common_options(
    *, output_flags: Sequence[str] = ("-o", "--output"), leave_out: Iterable[str] = ()
) -> Callable[[Command], Command]:
    """Return the options that commands share.

    Args:
        output_flags: the flags of the output format: others where ``-o`` means something else, none where nothing is
            written to stdout.
        leave_out: settings that get no flag, for commands where they mean something else or nothing. ``timeout_s`` is
            the deadline.
    """
    left_out = set(leave_out)
    settings = {name: short for name, short in _COMMON_SETTINGS.items() if name not in left_out}
    decorators = [_setting_option(named_setting(name), *short) for name, short in settings.items()]
    if output_flags:
        decorators.append(
            _common(*output_flags, name="output", type=click.Choice(OUTPUT_FORMATS), help="output format")
        )
    if "timeout_s" not in left_out:
        deadline = SettingType(named_setting("request_timeout_s"))
        decorators.append(_common("--timeout", name="timeout_s", type=deadline, help="how long to wait, such as 5s"))
    decorators += [
        _common(
            "--config", name="file", type=click.Path(path_type=Path, dir_okay=False),
            help="settings file  [KVD_CONFIG; default: kvd.toml, /etc/kvd/kvd.toml]",
        ),
        _common("-v", "--verbose", name="verbose", is_flag=True, help="log everything; show tracebacks of errors"),
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
    setattr(options_of(ctx), name, value)

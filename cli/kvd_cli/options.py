"""Options of a command line and the settings that follow from them. `kvd_cli.flags` declares the options."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import click

from kvd.config import Config, Loaded, all_settings, load
from kvd.observe import log

_META: Final = "kvd_cli.options"
OF_ONE_PROCESS: Final = ("bind", "node_id", "preferred_rank", "local_rank", "role", "parent_pid")
"""Settings that several processes never share."""

OF_METRICS: Final = ("metrics_bind", "metrics_token_file")
"""Settings of daemons that somebody watches."""

OF_SNAPSHOTS: Final = ("snapshot_dir", "snapshot_every", "snapshot_keep", "restore")
"""Settings of jobs that take snapshots, or begin with one."""

Output = Literal["table", "json"]
OUTPUT_FORMATS: Final[tuple[Output, ...]] = ("table", "json")

_log = logging.getLogger(__name__)


@dataclass
class Options:
    """Options of the group and of the command; those of the command win.

    Attributes:
        settings: for each flag that was given, the name of the setting and its text.
        file: of ``--config``.
        timeout_s: of ``--timeout``.
        output: the format of stdout.
        verbose: True if ``-v`` was given.
        loaded: the last result of `load`.
    """

    settings: dict[str, object] = dataclasses.field(default_factory=dict)
    file: Path | None = None
    timeout_s: float | None = None
    output: Output = "table"
    verbose: bool = False
    loaded: Loaded | None = None

    def load(self) -> Loaded:
        """Load the settings of this process, and warn about variables that look misspelt.

        Raises:
            ConfigError: a setting is wrong.
        """
        loaded = self._load()
        for note in loaded.notes:
            _log.warning("%s", note)
        return loaded

    def load_silently(self) -> Loaded:
        """Load the settings of a daemon, which logs the notes itself."""
        self._use_timeout()
        if self.timeout_s is not None:
            self.settings.setdefault("join_timeout_s", self.timeout_s)
        return self._load()

    def load_daemon(self) -> Loaded:
        """Load the settings of a job; ``--timeout`` is the deadline of its calls."""
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
            self.settings.setdefault("round_timeout_s", self.timeout_s)

    def load_client(self) -> Loaded:
        """Load the settings of a command that queries a cluster, with ``--timeout`` as its deadline.

        Such a command logs warnings and errors only, unless ``log_level`` was given.
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
    """Return the options of the running command."""
    return options_of(click.get_current_context())


def is_verbose(ctx: click.Context) -> bool:
    """Return whether ``-v`` was given."""
    return options_of(ctx).verbose


def options_of(ctx: click.Context) -> Options:
    """Return the options of a context, shared by the group and the command."""
    options = ctx.meta.setdefault(_META, Options())
    assert isinstance(options, Options)
    return options


def with_deadline(config: Config, timeout_s: float) -> Config:
    """Return the settings of a short-lived client with this deadline.

    A deadline must be longer than the time to detect a death. This process declares no node dead, so its own timeouts
    may shrink with the deadline; those of the cluster stay as they are.
    """
    beat_s = min(config.heartbeat_interval_s, timeout_s / 8)
    return dataclasses.replace(
        config,
        request_timeout_s=timeout_s,
        join_timeout_s=timeout_s,
        round_timeout_s=timeout_s,
        heartbeat_interval_s=beat_s,
        server_timeout_s=min(config.server_timeout_s, timeout_s / 2),
        worker_timeout_s=min(config.worker_timeout_s, timeout_s / 2),
    )

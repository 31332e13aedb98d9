"""The daemons by role: the scheduler and the server, run from their settings to the exit code of the process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kvd.config import Loaded, Role
from kvd.errors import KvdError
from kvd.node.daemon.daemon import Daemon
from kvd.node.daemon.exit_codes import exit_code_of
from kvd.node.daemon.process_limits import forbid_core_dumps, raise_descriptor_limit, share_one_pool
from kvd.node.daemon.ready_file import ReadyFile
from kvd.node.daemon.scheduler_role import SchedulerRole
from kvd.node.daemon.server_role import ServerRole
from kvd.observe.log import configure, event

logger = logging.getLogger("kvd.node")


def new_daemon(loaded: Loaded, role: Role) -> Daemon:
    """A scheduler or a server that is ready to run.

    Raises:
        ConfigError: the settings do not suit the role.
    """
    return Daemon(loaded.config, SchedulerRole(loaded) if role == "scheduler" else ServerRole(loaded))


def run_daemon(loaded: Loaded, role: Role, *, ready_file: Path | None = None) -> int:
    """Run until SIGTERM, SIGINT, the end of the parent, or an error; return the exit code of the process."""
    config = loaded.config
    configure(config.log_format, config.log_level, role)
    for note in loaded.notes:
        event(logger, logging.WARNING, note)
    ready = None if ready_file is None else ReadyFile(ready_file)
    try:
        if ready is not None:
            ready.check()
        raise_descriptor_limit()
        forbid_core_dumps()
        share_one_pool()
        return asyncio.run(new_daemon(loaded, role).run(ready))
    except KvdError as error:
        event(logger, logging.ERROR, str(error))
        return exit_code_of(error)
    finally:
        if ready is not None:
            ready.remove()

"""Settings, each declared once in `kvd.config.settings`. The environment is read in this package only.

A setting has one name in three spellings: ``slice_bytes`` as a keyword and in the file, ``--slice-bytes`` as a flag,
``KVD_SLICE_BYTES`` as a variable.
"""

from kvd.config.addresses import Address, parse_address, tcp_address
from kvd.config.environment import (
    SystemdEnvironment,
    child_environment,
    config_home,
    credentials_directory,
    local_world_size,
    program_command,
    python_path,
    rank_contradictions,
    rank_variables,
    shared_environment,
    systemd_environment,
    terminal_colour,
    torch_rendezvous,
    with_unset,
)
from kvd.config.memory import machine_memory_bytes
from kvd.config.setting import Role, Setting
from kvd.config.settings import Config, all_settings, named_setting
from kvd.config.sources import Loaded, load
from kvd.config.values import KiB, MiB

__all__ = [
    "Config",
    "Setting",
    "all_settings",
    "named_setting",
    "Role",
    "load",
    "Loaded",
    "Address",
    "parse_address",
    "tcp_address",
    "KiB",
    "MiB",
    "SystemdEnvironment",
    "systemd_environment",
    "child_environment",
    "config_home",
    "credentials_directory",
    "program_command",
    "python_path",
    "rank_contradictions",
    "rank_variables",
    "local_world_size",
    "shared_environment",
    "torch_rendezvous",
    "with_unset",
    "terminal_colour",
    "machine_memory_bytes",
]

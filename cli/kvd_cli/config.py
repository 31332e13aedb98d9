"""``kvd config``: settings of this shell and their origins."""

from __future__ import annotations

import click

from kvd.config import all_settings
from kvd.observe import log
from kvd_cli.flags import common_options, setting_options
from kvd_cli.options import current
from kvd_cli.output import print_json, print_table


@click.group()
def config() -> None:
    """Show the settings and where they come from."""


@config.command()
@click.option("--origin", is_flag=True, help="show where each value comes from")
@setting_options()
@common_options()
def show(origin: bool) -> None:
    """Show all settings as flags, variables, the settings file and the defaults give them."""
    options = current()
    log.configure("auto", "warning", "kvd")
    loaded = options.load_daemon()
    values = {setting.name: getattr(loaded.config, setting.name) for setting in all_settings()}
    if options.output == "json":
        if origin:
            print_json({name: {"value": value, "origin": loaded.origin[name]} for name, value in values.items()})
        else:
            print_json(values)
        return
    rows = [[setting.name, setting.show(values[setting.name])] for setting in all_settings()]
    if origin:
        print_table(["SETTING", "VALUE", "ORIGIN"], [[*row, loaded.origin[row[0]]] for row in rows])
    else:
        print_table(["SETTING", "VALUE"], rows)

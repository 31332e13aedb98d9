"""What is imported when, told by the modules that are there: a time would depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvd

ROOT = Path(__file__).resolve().parents[1]
PLUG_INS = {"torch", "jax", "numba", "cupy", "sklearn"}
OF_THE_COMMAND_LINE = {"click", "rich", "kvd_cli"}
OF_FILES = {"safetensors", "tomllib", "email", "importlib.metadata"}
OF_STORES = {"numpy", "zmq", "msgpack", "ml_dtypes", "asyncio", "ssl", "logging", "subprocess"}


def imported_by(code: str) -> set[str]:
    """The modules that a new interpreter has after this code, besides those that it starts with."""
    tell = "import json\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    program = f"import sys\nbefore = set(sys.modules)\n{code}\n{tell}"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_kvd_imports_only_its_errors() -> None:
    modules = imported_by("import kvd")
    assert {name for name in modules if name.startswith("kvd")} == {"kvd", "kvd.errors", "kvd.version"}
    assert modules.isdisjoint(PLUG_INS | OF_THE_COMMAND_LINE | OF_FILES | OF_STORES)


def test_create_imports_what_every_store_needs_and_nothing_more() -> None:
    modules = imported_by("import kvd\nkvd.create")
    assert modules >= {"numpy", "zmq", "msgpack", "asyncio"}
    assert modules.isdisjoint(PLUG_INS | OF_THE_COMMAND_LINE | OF_FILES)


def test_a_local_store_is_used_without_plug_ins() -> None:
    code = "import kvd\nkv = kvd.create()\nkv.init('w', __import__('numpy').ones(3))\nkv.pull('w')\nkv.close()"
    assert imported_by(code).isdisjoint(PLUG_INS | OF_THE_COMMAND_LINE | {"safetensors"})


def test_the_help_of_the_command_line_imports_no_store_and_no_daemon() -> None:
    modules = imported_by(
        "import kvd_cli.main\nsys.argv = ['kvd', '--help']\n"
        "try:\n    kvd_cli.main.main()\nexcept SystemExit as end:\n    assert end.code == 0"
    )
    assert modules.isdisjoint(PLUG_INS | {"zmq", "kvd.client.cluster", "kvd.node.daemon.roles", "kvd.core.server"})


def test_every_public_name_is_there() -> None:
    assert imported_by("import kvd\nassert all(getattr(kvd, name) is not None for name in kvd.__all__)")
    assert set(kvd.__all__) <= set(dir(kvd))


def test_all_names_come_with_a_star() -> None:
    names: dict[str, object] = {}
    exec("from kvd import *", names)
    assert set(kvd.__all__) <= names.keys()
    assert names["create"] is kvd.create


def test_a_name_that_is_not_there_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvd' has no attribute 'creat'"):
        _ = kvd.creat
    assert not hasattr(kvd, "KVStor")

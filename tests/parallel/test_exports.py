"""What ``from kvd.parallel import *`` gives where torch or JAX is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

LIBRARIES = {"torch": "TorchModel", "jax": "JaxModel"}


def run(program: str, missing: tuple[str, ...]) -> str:
    """What the program prints in a new process that cannot import the missing libraries."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"  # None there: the import fails
    command = [sys.executable, "-c", hidden + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("missing", [("jax",), ("torch",), ("torch", "jax")])
def test_import_star_leaves_out_what_is_not_installed(missing: tuple[str, ...]) -> None:
    names = run("from kvd.parallel import *\nprint(*globals())", missing).split()
    assert {"DataParallelExecutorGroup", "Sequential", "fit"} <= set(names)
    installed = {library for library in LIBRARIES if library not in missing and importlib.util.find_spec(library)}
    assert {library for library, model in LIBRARIES.items() if model in names} == installed


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_whose_library_is_missing_says_how_to_install_it(library: str) -> None:
    model = LIBRARIES[library]
    program = f"import kvd.parallel\ntry:\n    kvd.parallel.{model}\nexcept ImportError as error:\n    print(error)"
    assert run(program, (library,)).strip() == f"{model} needs {library}: pip install {library}"


def test_importing_the_package_imports_neither_library() -> None:
    assert run("import kvd.parallel, sys\nprint({'torch', 'jax'} & set(sys.modules))", ()).strip() == "set()"

"""Commands that move one value between a file and a cluster: ``init``, ``push``, ``pull``, ``pushpull``."""

from __future__ import annotations

import io
import math
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvd.errors import ConfigError
from kvd.files import open_file
from kvd.protocol.specs import MERGES
from kvd_cli.connect import as_worker, observer
from kvd_cli.flags import common_options
from kvd_cli.options import OUTPUT_FORMATS, current
from kvd_cli.outfile import Sink, write_file
from kvd_cli.output import print_json, print_table, size

if TYPE_CHECKING:  # `kvd --help` needs no client
    from kvd.client.cluster.observer import Reading

Array = npt.NDArray[Any]
Command = TypeVar("Command", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path, dir_okay=False)
_DTYPES = (
    "float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "uint8",
)  # fmt: skip


class OutFile(click.Path):
    """Parameter type of an output file. ``json`` and ``table`` are refused: elsewhere ``-o`` is the output format."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value in OUTPUT_FORMATS:
            self.fail(
                f"-o takes a file here. For the output format give --format {value}; to write to a file of this name, "
                f"-o ./{value}",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def _value_arguments(command: Command) -> Command:
    command = click.option("--dtype", type=click.Choice(_DTYPES), help="convert the array to this dtype first")(command)
    command = click.argument("file", type=_FILE, metavar="FILE.npy")(command)
    return click.argument("key")(command)


@click.command()
@_value_arguments
@click.option("--merge", type=click.Choice(MERGES), help="how pushes to it are merged; default: as in the cluster")
@common_options(output_flags=())
def init(key: str, file: Path, dtype: str | None, merge: str | None) -> None:
    """Create KEY with the array in FILE.npy as its value.

    This joins the cluster as a worker.
    """
    array = read_array(file, dtype)
    with as_worker(f"making {key!r}") as store:
        store.init(key, array, merge=merge)


@click.command()
@_value_arguments
@common_options(output_flags=())
def push(key: str, file: Path, dtype: str | None) -> None:
    """Push the array in FILE.npy to KEY.

    This joins the cluster as a worker and returns when the push is acknowledged.
    """
    array = read_array(file, dtype)
    with as_worker(f"waiting until the push of {key!r} counts, which may take pushes of all other workers") as store:
        store.push(key, array)
        store.flush()


@click.command()
@_value_arguments
@click.option("-o", "out", type=OutFile(), metavar="OUT.npy", help="write the new value to this file")
@common_options(output_flags=("--format",))
def pushpull(key: str, file: Path, dtype: str | None, out: Path | None) -> None:
    """Push the array in FILE.npy to KEY, and get the new value.

    This joins the cluster as a worker. With dist_sync it waits for the pushes of all others.
    """
    array = read_array(file, dtype)
    with as_worker(f"waiting for the new value of {key!r}, which may take pushes of all other workers") as store:
        value = store.pushpull(key, array)
    _deliver(key, value, out)


@click.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@click.option(
    "-o",
    "out",
    type=OutFile(),
    metavar="FILE",
    help="write the value here instead of showing a summary: to a .npy file, or several values to an .npz file",
)
@common_options(output_flags=("--format",))
def pull(keys: tuple[str, ...], out: Path | None) -> None:
    """Get the value of each KEY without joining as a worker.

    With dist_sync, several values are of one step of the training.
    """
    with observer(f"pulling {', '.join(map(repr, keys))}") as cluster:
        reading = cluster.read(list(keys))
    if len(keys) == 1:
        _deliver(keys[0], reading.values[0], out)
    elif out is not None:
        write_arrays(out, dict(zip(keys, reading.values, strict=True)))
    else:
        _show_all(keys, reading)


def read_array(file: Path, dtype: str | None = None) -> Array:
    """Read the array of a .npy file, converted to a dtype if one is given. Nothing in the file is executed.

    Raises:
        ConfigError: it cannot be read, or does not hold an array of numbers.
    """
    try:
        with open_file(file) as opened:
            array = np.load(opened, allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, EOFError):  # their texts suggest trusting the file
        raise ConfigError(f"{file} is not a complete .npy file with an array of numbers") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise ConfigError(f"{file} is an archive: give a .npy file with one array")
    if array.dtype.kind not in "fiub":
        raise ConfigError(f"{file} has the dtype {array.dtype}: a value is an array of numbers")
    if dtype is not None:
        return array.astype(_dtype(dtype))
    if array.dtype.name not in _DTYPES:
        raise ConfigError(f"{file} has the dtype {array.dtype}: give --dtype with one of {', '.join(_DTYPES)}")
    return array


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def write_array(file: Path, array: Array) -> None:
    """Write a .npy file under exactly this name: see `write_file`.

    Raises:
        ConfigError: it cannot be written.
    """
    plain = _for_npy([array])[0]
    write_file(file, lambda sink: np.save(sink, plain, allow_pickle=False))


def write_arrays(file: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz file under exactly this name, with an array for each key: see `write_file`.

    Raises:
        ConfigError: it cannot be written.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        for key, array in zip(arrays, _for_npy(list(arrays.values())), strict=True):
            with members.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.save(member, array, allow_pickle=False)

    def save(sink: Sink) -> None:
        sink.write(archive.getvalue())

    write_file(file, save)


def _for_npy(arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays in dtypes that .npy files support."""
    if all(array.dtype.name != "bfloat16" for array in arrays):
        return list(arrays)
    click.echo(
        "note: .npy files have no bfloat16: the values are written as float32, which holds them exactly", err=True
    )
    return [array.astype(np.float32) if array.dtype.name == "bfloat16" else array for array in arrays]


def _show_all(keys: Sequence[str], reading: Reading) -> None:
    """Write a summary of several values of one step to stdout."""
    summaries = [summarise(key, value) for key, value in zip(keys, reading.values, strict=True)]
    if current().output == "json":
        rows = [{**summary, "version": reading.versions[summary["key"]]} for summary in summaries]
        print_json({"version": reading.version, "keys": rows})
        return
    table = [[key, reading.versions[key], *_row(value)] for key, value in zip(keys, reading.values, strict=True)]
    print_table(["KEY", "VERSION", *_COLUMNS], table)


_COLUMNS = ("SHAPE", "DTYPE", "BYTES", "MIN", "MAX", "MEAN")


def _row(value: Array) -> list[object]:
    """Return the table row of a value."""
    summary = summarise("", value)
    shape = "×".join(map(str, value.shape)) or "scalar"
    figures = ["-" if summary[name] is None else summary[name] for name in ("min", "max", "mean")]
    return [shape, summary["dtype"], size(value.nbytes), *figures]


def _deliver(key: str, value: Array, out: Path | None) -> None:
    """Write a value to a file, or a summary of it to stdout."""
    if out is not None:
        write_array(out, value)
        return
    if current().output == "json":
        print_json(summarise(key, value))
        return
    print_table(["KEY", *_COLUMNS], [[key, *_row(value)]])
    sys.stdout.flush()
    click.echo(_shown(value))


def summarise(key: str, value: Array) -> dict[str, Any]:
    """Return a short description of an array. Numbers that JSON cannot hold become text."""
    wide = value.astype(np.float64)
    figures = (wide.min(), wide.max(), wide.mean()) if value.size else (None, None, None)
    named = dict(zip(("min", "max", "mean"), (_plain(figure) for figure in figures), strict=True))
    return {"key": key, "shape": list(value.shape), "dtype": value.dtype.name, "bytes": value.nbytes, **named}


def _plain(figure: Any) -> float | str | None:
    if figure is None:
        return None
    number = float(f"{float(figure):.6g}")
    return number if math.isfinite(number) else str(number)


def _shown(value: Array) -> str:
    with np.printoptions(threshold=50, edgeitems=3, linewidth=100):
        return str(value)

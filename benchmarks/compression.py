"""What compression costs a core, and what it saves on a slow network: ``python -m benchmarks.compression``.

First each compressor with its defaults, and some with other parameters, encode and decode one slice of normally
distributed gradients, in one thread: the best of some tries. Then one worker pushes all keys of a work and waits for
the end of that, and pushes and pulls them, over a link of limited bandwidth: as many bytes per second leave it as
arrive, at the same time. All types are done in turn, in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import new_file, positive
from benchmarks.compare import heading, say
from benchmarks.report import digits, print_table, time_text
from kvd.compression import Compression, known_compressors, parse
from kvd.compute.codecs import codec_of, encode, encode_fed_back
from kvd.compute.compiled import warm_up_codecs
from kvd.config import MiB
from kvd.testing.cluster import LocalCluster
from kvd.testing.slowlink import slow_links
from kvd_cli.bench_work import WORK

PLAIN: Final = "none"
VARIANTS: Final[dict[str, dict[str, object]]] = {
    "2bit, threshold=0.5": {"type": "2bit", "threshold": 0.5},
    "topk, k=0.1": {"type": "topk", "k": 0.1},
    "randomk, k=0.1": {"type": "randomk", "k": 0.1},
}
CODEC_HEADINGS: Final = ("type", "bytes per element", "encode", "with feedback", "decode")
STEP_HEADINGS: Final = ("type", "push", "of a plain one", "pushpull", "of a plain one")


class CodecFigures(NamedTuple):
    """Of one compressor; the rates are bytes of float32 per second."""

    bytes_per_element: float
    encode_bytes_per_s: float
    feedback_bytes_per_s: float
    decode_bytes_per_s: float


def codec_figures(compression: Compression, size: int, tries: int) -> CodecFigures:
    """Encodes and decodes a slice of this many elements."""
    codec = codec_of(compression.compressor)
    values = np.random.default_rng(1).normal(size=size).astype(np.float32)
    out, residual, decoded = np.empty(codec.max_nbytes(size), np.uint8), np.zeros_like(values), np.empty_like(values)
    nbytes = encode(codec, values, out, 0)
    data = out[:nbytes].copy()
    return CodecFigures(
        nbytes / size,
        values.nbytes / _best_s(lambda: encode(codec, values, out, 0), tries),
        values.nbytes / _best_s(lambda: encode_fed_back(codec, values, residual, out, 0), tries),
        values.nbytes / _best_s(lambda: codec.decode(data, decoded), tries),
    )


def _best_s(work: Callable[[], object], tries: int) -> float:
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


class Step(NamedTuple):
    """Seconds of both calls."""

    push_s: float
    pushpull_s: float


def steps(types: Sequence[str], sizes: Sequence[int], bytes_per_s: float, rounds: int) -> dict[str, list[Step]]:
    """What each step took, by type.

    Args:
        sizes: elements of each key.
        bytes_per_s: what the link lets through, each way.
    """
    found: dict[str, list[Step]] = {name: [] for name in types}
    with LocalCluster(1, processes=True, shared_memory="off") as cluster:  # the server counts as far away
        with slow_links(bytes_per_s, both_ways=True):
            kv = cluster.store()
        keys = [f"key{number}" for number in range(len(sizes))]
        random = np.random.default_rng(2)
        gradients = [random.normal(size=size).astype(np.float32) for size in sizes]
        weights = [np.zeros(size, np.float32) for size in sizes]
        kv.init(keys, weights)
        for round_ in range(rounds + 1):  # the first one warms up
            for name in types:
                kv.set_gradient_compression({"type": name})
                begin = time.perf_counter()
                kv.push(keys, gradients).wait()
                pushed = time.perf_counter()
                kv.pushpull(keys, gradients, out=weights)
                if round_:
                    found[name].append(Step(pushed - begin, time.perf_counter() - pushed))
    return found


def codec_lines(found: dict[str, CodecFigures]) -> list[tuple[str, ...]]:
    """The cells of the first table."""
    return [
        (name, digits(figures[0]), *[f"{digits(rate / 1e9)} GB/s" for rate in figures[1:]])
        for name, figures in found.items()
    ]


def step_lines(found: dict[str, list[Step]]) -> list[tuple[str, ...]]:
    """The cells of the second table: medians."""
    medians = {name: Step(*map(statistics.median, zip(*taken, strict=True))) for name, taken in found.items()}
    plain = medians.get(PLAIN, Step(0, 0))
    return [
        (
            name,
            time_text(middle.push_s * 1e6),
            f"{middle.push_s / plain.push_s:.3f}",
            time_text(middle.pushpull_s * 1e6),
            f"{middle.pushpull_s / plain.pushpull_s:.3f}",
        )
        for name, middle in medians.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    options = _options(arguments)
    warning = machine.load_warning()
    if warning:
        say(warning)
    console = Console()
    warm_up_codecs()
    found: dict[str, CodecFigures] = {}
    for name, params in {**{name: {"type": name} for name in known_compressors()}, **VARIANTS}.items():
        compression = parse(params)
        assert compression is not None
        found[name] = codec_figures(compression, round(options.slice_mib * MiB) // 4, options.tries)
    print_table(console, CODEC_HEADINGS, codec_lines(found))
    types = [PLAIN, *(name for name in known_compressors() if name in options.types.split(","))]
    taken = steps(types, WORK[options.work], options.megabytes_per_s * 1e6, options.rounds) if types[1:] else {}
    if taken:
        print_table(console, STEP_HEADINGS, step_lines(taken))
    if options.json is not None:
        document: dict[str, Any] = {
            "codecs": {name: figures._asdict() for name, figures in found.items()},
            "steps": taken,
        }
        options.json.write_text(json.dumps({**heading(), **document}, indent=1) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compression", description=__doc__)
    parser.add_argument("--slice-mib", type=positive(float), default=1.0, help="what is encoded at a time")
    parser.add_argument("--tries", type=positive(int), default=30, help="of which the best counts")
    parser.add_argument("--types", default="fp16,int8,2bit,topk", help="types of steps, with commas; empty: no steps")
    parser.add_argument("--work", choices=WORK, default="resnet50", help="the keys, as kvd bench names them")
    parser.add_argument("--megabytes-per-s", type=positive(float), default=125.0, help="bandwidth of the link")
    parser.add_argument("--rounds", type=positive(int), default=5, help="steps of each type")
    parser.add_argument("--json", type=new_file, help="also write everything to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

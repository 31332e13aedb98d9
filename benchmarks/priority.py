"""What priorities are worth where the network is slow: ``python -m benchmarks.priority``.

A model of some layers takes steps as in training. The backward pass yields the gradient of the last layer first, and
each is pushed at once; the next forward pass needs the weights of the first layer first. Layer by layer it waits until
they are back, then computes. Computing is a sleep; the network is one link on which a limited number of bytes leave
this worker per second. Steps with priorities (higher for earlier layers) and without are done in turn, in one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console

import kvd
from benchmarks import machine
from benchmarks.arguments import new_file, positive
from benchmarks.compare import heading, say
from benchmarks.report import print_table, time_text
from kvd.config import KiB, MiB
from kvd.testing.cluster import LocalCluster
from kvd.testing.slowlink import slow_links
from kvd_cli.bench_svg import size_text

WARM_UP_STEPS: Final = 2
HEADINGS: Final = ("", "layer 0 is back", "whole step")


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained, and over which network.

    Attributes:
        layer_bytes: of the weights of each layer.
        forward_s: what the forward pass of one layer takes.
        backward_s: what the backward pass of one layer takes.
        bytes_per_s: what the link lets through.
        slice_bytes: the largest message.
        credit_bytes: what is on its way to the server at a time, and cannot be overtaken any more.
    """

    layers: int
    layer_bytes: int
    forward_s: float
    backward_s: float
    bytes_per_s: float
    slice_bytes: int
    credit_bytes: int

    @property
    def transfer_s(self) -> float:
        """How long the gradients of one step keep the link busy, in seconds."""
        return self.layers * self.layer_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Step:
    """How long one step took.

    Attributes:
        first_s: from the push of layer 0's gradient until its weights are back.
        whole_s: from the beginning of the backward pass to the end of the forward pass.
    """

    first_s: float
    whole_s: float


class Training:
    """A worker with the keys of a model in a given store."""

    def __init__(self, kv: kvd.KVStore, model: Model) -> None:
        self._kv = kv
        self._model = model
        self._keys = [f"layer{number}" for number in range(model.layers)]
        count = model.layer_bytes // 4
        self._gradients = [np.ones(count, np.float32) for _ in self._keys]
        self._weights = [np.zeros(count, np.float32) for _ in self._keys]
        kv.init(self._keys, self._gradients)

    def step(self, *, priorities: bool) -> Step:
        """Backward, then forward; all weights are back when it returns."""
        begin = time.perf_counter()
        handles: dict[int, kvd.Handle] = {}
        for layer in reversed(range(self._model.layers)):
            time.sleep(self._model.backward_s)
            priority = self._model.layers - layer if priorities else 0
            handles[layer] = self._kv.pushpull_async(
                self._keys[layer], self._gradients[layer], self._weights[layer], priority
            )
        pushed, first_s = time.perf_counter(), 0.0
        for layer in range(self._model.layers):
            handles[layer].wait()
            if layer == 0:
                first_s = time.perf_counter() - pushed
            time.sleep(self._model.forward_s)
        return Step(first_s, time.perf_counter() - begin)


def measure(model: Model, rounds: int) -> dict[bool, list[Step]]:
    """Steps with priorities (True) and without (False), in turn, with a different one first each time."""
    found: dict[bool, list[Step]] = {True: [], False: []}
    cluster = LocalCluster(
        num_workers=1,
        processes=True,
        slice_bytes=model.slice_bytes,
        credit_bytes=model.credit_bytes,
        shared_memory="off",  # the server counts as far away
    )
    with cluster:
        with slow_links(model.bytes_per_s):
            kv = cluster.store()
        training = Training(kv, model)
        for _ in range(WARM_UP_STEPS):
            training.step(priorities=True)
        for number in range(rounds):
            for priorities in (number % 2 == 0, number % 2 == 1):
                found[priorities].append(training.step(priorities=priorities))
    return found


def medians(steps: Sequence[Step]) -> Step:
    """The median of each figure."""
    return Step(statistics.median(step.first_s for step in steps), statistics.median(step.whole_s for step in steps))


def lines(found: dict[bool, list[Step]]) -> list[tuple[str, ...]]:
    """With, without, and the ratio of the two."""
    priorities, none = medians(found[True]), medians(found[False])
    return [
        ("priorities", time_text(priorities.first_s * 1e6), time_text(priorities.whole_s * 1e6)),
        ("none", time_text(none.first_s * 1e6), time_text(none.whole_s * 1e6)),
        ("ratio", f"{priorities.first_s / none.first_s:.2f}", f"{priorities.whole_s / none.whole_s:.2f}"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    options = _options(arguments)
    model = Model(
        layers=options.layers,
        layer_bytes=round(options.layer_mib * MiB) // 4 * 4,
        forward_s=options.forward_ms / 1e3,
        backward_s=options.backward_ms / 1e3,
        bytes_per_s=options.megabytes_per_s * 1e6,
        slice_bytes=options.slice_kib * KiB,
        credit_bytes=options.credit_kib * KiB,
    )
    warning = machine.load_warning()
    if warning:
        say(warning)
    found = measure(model, options.rounds)
    console = Console()
    console.print(_in_words(model), soft_wrap=True, highlight=False)
    print_table(console, HEADINGS, lines(found))
    if options.json is not None:
        document = {**heading(), "model": dataclasses.asdict(model), **_document(found)}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _document(found: dict[bool, list[Step]]) -> dict[str, Any]:
    names = {True: "with_priorities", False: "without"}
    return {names[mode]: [dataclasses.asdict(step) for step in steps] for mode, steps in found.items()}


def _in_words(model: Model) -> str:
    back, forth, busy = (time_text(s * 1e6) for s in (model.backward_s, model.forward_s, model.transfer_s))
    return (
        f"{model.layers} layers of {size_text(model.layer_bytes)}, computing {back} back and {forth} forth each; "
        f"a link of {model.bytes_per_s / 1e6:g} MB/s, which one step keeps busy for {busy}. "
        f"Medians; the first column counts from the push of layer 0."
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.priority", description=__doc__)
    parser.add_argument("--rounds", type=positive(int), default=11, help="steps of each kind")
    parser.add_argument("--layers", type=positive(int), default=16)
    parser.add_argument("--layer-mib", type=positive(float), default=1.0, help="weights of a layer")
    parser.add_argument("--forward-ms", type=positive(float), default=8.0, help="time of a layer's forward pass")
    parser.add_argument("--backward-ms", type=positive(float), default=8.0, help="time of a layer's backward pass")
    parser.add_argument("--megabytes-per-s", type=positive(float), default=50.0, help="bandwidth of the link")
    parser.add_argument("--slice-kib", type=positive(int), default=256, help="the largest slice")
    parser.add_argument("--credit-kib", type=positive(int), default=512, help="most bytes in flight to a server")
    parser.add_argument("--json", type=new_file, help="also write everything to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

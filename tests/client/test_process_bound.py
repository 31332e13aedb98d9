"""Copies of what belongs to one process are refused; errors can be sent to another one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

import kvd
from kvd.errors import GradientAnomaly, JobBusy, JobEnded, KvdError, NodeLost, NotCopyable
from kvd.parallel import AllReduceParameter, DataParallelExecutorGroup, TorchModel
from kvd.testing.cluster import LocalCluster
from tests.client.harness import ones


class Trainer:
    """A program's object that holds something of kvd."""

    def __init__(self, part: object) -> None:
        self.parts = {"part": [part]}


HOW: dict[str, Callable[[Any], Any]] = {
    "pickle": pickle.dumps,
    "pickle 2": lambda value: pickle.dumps(value, 2),
    "deepcopy": copy.deepcopy,
    "copy": lambda value: copy.copy(value.parts["part"][0]),
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
    "an argument of a process": ForkingPickler.dumps,
}


def refused(value: object, *texts: str) -> None:
    for how, make in HOW.items():
        with pytest.raises(NotCopyable, match="cannot be copied, pickled or saved") as caught:
            make(Trainer(value))
        assert isinstance(caught.value, TypeError), how
        assert all(text in str(caught.value) for text in texts), how


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_store_and_what_it_gives(kind: str) -> None:
    with LocalCluster(1, 1) as cluster:
        kv = kvd.create("local") if kind == "local" else cluster.store()
        refused(kv, "create one in each process", "__getstate__")
        kv.init("w", ones())
        refused(kv.init_async("v", ones()), "wait for it here")
        refused(kv.push("w", ones()), "wait for it here")
        refused(kv.steps(3), "call kv.steps in the process")
        kept = copy.deepcopy(kv.bind("w"))  # arrays are arrays
        kept[0][:] = 7
        assert kv.bind("w")[0].tolist() != kept[0].tolist()
        kv.close()
        refused(kv, "create one in each process")
        with kvd.Observer(**{**cluster.settings, "scheduler": cluster.address}) as observer:
            refused(observer, "create one in each process")


@pytest.mark.asyncio
async def test_a_store_of_an_event_loop() -> None:
    kv = await kvd.aio.create("local")
    refused(kv, "create one in each process")
    refused(kv.init_async("w", ones()), "wait for it here")
    refused(kv.steps(3), "call kv.steps")
    await kv.close()


def test_groups_and_models() -> None:
    module = torch.nn.Linear(3, 2)
    model = TorchModel(module, torch.nn.MSELoss())
    group = DataParallelExecutorGroup(model, ["cpu", "cpu"], [("data", (4, 3))], [("label", (4, 2))])
    refused(model, "save its module")
    refused(group, "save what get_params gives")
    with kvd.create("local") as kv:
        group.bind_to(kv)
        refused(group, "save what get_params gives")
        refused(AllReduceParameter(kv, 1, 1, 4), "save its weight_partition")
        copy.deepcopy(module)


def every_error(kind: type[KvdError] = KvdError) -> Iterator[type[KvdError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from every_error(derived)


SAMPLES: dict[type[KvdError], KvdError] = {
    GradientAnomaly: GradientAnomaly("w", "cpu"),
    NodeLost: NodeLost("gone", node="worker 1", last_seen_s=2.0, reason="silent"),
    JobEnded: JobEnded("over", job="digits"),
    JobBusy: JobBusy("taken", job="digits"),
}


@pytest.mark.parametrize("kind", [kind for kind in every_error() if kind.__module__ == "kvd.errors"])
def test_errors_reach_another_process_with_their_attributes(kind: type[KvdError]) -> None:
    """A pool of processes hangs on an error that it cannot unpickle."""
    error = SAMPLES.get(kind) or kind("a text")
    error.add_note("a note")
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error), copy.copy(error)):
        assert type(other) is kind
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))

"""The check that every worker trains the same model in the same way."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from kvd.client.facades.blocking import KVStore
from kvd.errors import KeyExists, NotAllowed


def check_same_on_all_workers(store: KVStore, key: str, described: Mapping[str, str]) -> None:
    """Compare the description of a model and its options with that of worker 0.

    All workers call it, before they make other keys. Two small keys stay on the servers, for workers that join or are
    restarted later, and for the program that continues from a snapshot.

    Args:
        key: the name that these keys begin with.
        described: name of a parameter or option → dtype and shape, or value.

    Raises:
        NotAllowed: it differs; the message names the first difference and this worker. Or this process has made the
            comparison under this name already.
        BarrierBroken: another worker, which it names, differs and has ended.
    """
    own = json.dumps(list(described.items())).encode()
    try:
        store.init(f"{key}/bytes", np.array([len(own)], np.int64), merge="sum")
    except KeyExists:
        raise NotAllowed(f"this store has a {key} already: create another store, with a job of its own") from None
    size = int(store.pull(f"{key}/bytes")[0])
    text = own if len(own) == size else bytes(size)
    store.init(f"{key}/description", np.frombuffer(text, np.uint8), merge="sum")
    theirs = dict(json.loads(store.pull(f"{key}/description").tobytes()))
    name = first_difference(described, theirs)
    if name is not None:
        whose = "worker 0" if store.rank else "the job that was restored"
        raise NotAllowed(
            f"worker {store.rank} has {_shown(name, described)}, {whose} has {_shown(name, theirs)}: all workers need "
            f"the same model and options"
        )
    store.barrier(f"{key}: same model")


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the first name that only one of them has, or has with another text; None if they are equal, in order."""
    for name in (*one, *other):
        if one.get(name) != other.get(name):
            return name
    return next((name for name, there in zip(one, other, strict=True) if name != there), None)


def _shown(name: str, described: Mapping[str, str]) -> str:
    if name not in described:
        return f"no {name!r}"
    return f"{name!r} ({described[name]}) at place {list(described).index(name)}"

"""The names of types: any case, and those of MXNet and BytePS."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kvd
from kvd.client.calls.backend import ALIASES, TYPES, store_type
from kvd.testing.cluster import LocalCluster

IN_THIS_PROCESS = {
    "Local": "local",
    "LOCAL": "local",
    "local_update_cpu": "local",
    "Local_AllReduce_CPU": "local",
    "Device": "device",
    "local_allreduce_device": "device",
    "NCCL": "device",
}
IN_A_CLUSTER = {
    "Dist_Sync": "dist_sync",
    "BytePS": "dist_sync",
    "horovod": "dist_sync",
    "DIST_DEVICE_SYNC": "dist_device_sync",
}
NO_TYPES: list[Any] = ["", "dist_sink", "local ", "ｌocal", 3, None, b"local", ["local"]]


@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_a_type_in_this_process(name: str) -> None:
    with kvd.create(name) as kv:
        assert kv.type == name.lower()

    async def program() -> str:
        async with await kvd.aio.create(name) as store:
            return store.type

    assert asyncio.run(program()) == name.lower()
    assert store_type(name)._replace(name="") == TYPES[IN_THIS_PROCESS[name]]._replace(name="")


@pytest.mark.parametrize("name", IN_A_CLUSTER)
def test_a_type_of_a_cluster(name: str) -> None:
    with LocalCluster(1, 1) as cluster:
        assert cluster.run(lambda kv: (kv.type, kv.num_servers), name) == [(name.lower(), 1)]
    assert store_type(name)._replace(name="") == TYPES[IN_A_CLUSTER[name]]._replace(name="")


@pytest.mark.parametrize("name", NO_TYPES, ids=repr)
def test_what_is_no_type_is_answered_with_the_list_of_types(name: Any) -> None:
    with pytest.raises(kvd.ConfigError) as caught:
        kvd.create(name)
    assert caught.value.setting == "type"
    assert repr(name) in str(caught.value)
    for known in (
        "local",
        "device",
        "dist_sync",
        "dist_async",
        "dist_device_sync",
        "dist_device_async",
        "byteps",
        "nccl",
    ):
        assert known in str(caught.value)


def test_each_alias_means_a_type() -> None:
    for alias, name in ALIASES.items():
        assert store_type(alias) == store_type(alias.upper()) == TYPES[name]._replace(name=alias)
        assert alias not in TYPES

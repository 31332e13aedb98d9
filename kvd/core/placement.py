"""Which server leads which slice. It depends on the key's name, never on the order of declaration."""

from __future__ import annotations

from zlib import crc32


def shard_of(key: str, slice_index: int, num_shards: int) -> int:
    """The shard of a slice. The slices of a key are in consecutive shards, so that a large key spreads evenly."""
    return (crc32(key.encode()) + slice_index) % num_shards


def initial_shards(num_shards: int, num_servers: int) -> tuple[int, ...]:
    """The first map from each shard to the rank of its server: round robin."""
    return tuple(shard % num_servers for shard in range(num_shards))

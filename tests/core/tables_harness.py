"""A server machine with tables, whose workers are played by the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvd.core.machine import Apply, Effect
from kvd.protocol.messages import Part, PullRows
from kvd.protocol.specs import KeySpec
from tests.core.fake_tables import packed_ids, pushed, table, unpacked_ids
from tests.core.fakes import cluster
from tests.core.server_harness import Harness


def with_table(spec: KeySpec | None = None, *, key: str = "t", workers: int = 2, **more: Any) -> Harness:
    """A server with this table. What is no setting of the cluster goes to the harness."""
    own = {name: more.pop(name) for name in ("memory", "fail") if name in more}
    harness = Harness(cluster(workers, **more), workers=workers, **own)
    harness.init(key, b"", spec or table())
    return harness


def push_rows(harness: Harness, rank: int, clock: int, ids: Sequence[int], **more: Any) -> list[Effect]:
    """A push of these rows to a part of a table."""
    return harness.push(rank, clock, pushed(ids, more.pop("fill", 1)), **({"key": "t"} | more))


def pull_rows(
    harness: Harness, rank: int, clock: int, ids: Sequence[int], *, key: str = "t", index: int = 0, request: int = 0
) -> list[Effect]:
    message = PullRows(request or harness.request(), Part(key, index, clock))
    return harness.say(rank, message, packed_ids(ids) or None)


def row_ids(job: Apply) -> list[tuple[int, int, list[int]]]:
    """Of each contribution of a round: the rank, the clock, and the ids of the rows."""
    found = []
    for given in job.contributions:
        assert given.span is not None
        count = given.span.nbytes // 16
        found.append((given.rank, given.clock, unpacked_ids(given.span._replace(nbytes=count * 8))))
    return found

"""The other nodes of a cluster, as a worker sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvd.client.calls import checks
from kvd.client.calls.backend import Node
from kvd.client.calls.handle import Handle
from kvd.client.calls.staleness import put_together
from kvd.client.cluster.answers import answer_bytes
from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.errors import KvdError
from kvd.protocol.messages import Command, MemberState, StatusQuery

STATUS_TIMEOUT_S = 2.0


class ClusterNodes:
    """Asks the servers, and reads the view that the scheduler sends.

    Attributes:
        engine: what runs this worker.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def send_command(self, head: int | str, body: bytes | str) -> Handle:
        name, data = checks.command_head(head), checks.command_body(body)
        control = requests.Control((Command(0, name),), payload=data, nbytes=len(data))
        return Handle(self.engine.submit(control), lambda answers: [answer_bytes(each) for each in answers], "command")

    def dead_nodes(self, timeout_s: float) -> Sequence[Node]:
        self.engine.check_usable()
        view, quiet = self.engine.machine.view, self.engine.session.quiet
        silent = {(entry.role, entry.rank): entry.age_s for entry in quiet if entry.age_s > timeout_s > 0}
        nodes = []
        for member in sorted(view.members.values(), key=lambda member: (member.role, member.rank)):
            age_s = silent.get((member.role, member.rank))
            if member.state in (MemberState.DEAD, MemberState.GONE):
                nodes.append(Node(member.role, member.rank, member.node_id, member.reason, member.last_seen_s))
            elif age_s is not None:
                nodes.append(Node(member.role, member.rank, member.node_id, f"silent for {age_s:g} s", age_s))
        return nodes

    def is_scheduler_dead(self, timeout_s: float) -> bool:
        return self.engine.scheduler_silence_s() > timeout_s > 0

    def most_nodes(self) -> Mapping[str, int]:
        settings = self.engine.machine.view.settings
        return {"server": settings.num_servers, "worker": settings.most_workers}

    def push_staleness(self) -> Handle:
        asked = self.engine.submit(requests.Control((StatusQuery(0),)))
        return Handle(
            asked, lambda answers: put_together(json.loads(answer_bytes(each)) for each in answers), "push_staleness"
        )

    def late_workers(self) -> tuple[str, ...]:
        try:
            answers = self.engine.submit(requests.Control((StatusQuery(0),)), STATUS_TIMEOUT_S).result()
        except KvdError:
            return ()
        names: set[str] = set()
        for answer in answers:
            names.update(json.loads(answer_bytes(answer)).get("waiting_for", ()))
        return tuple(sorted(names))

    def gone_workers(self) -> dict[int, bool]:
        view = self.engine.machine.view
        dead = view.dead_workers()
        taking_part = set(view.required_ranks()) - set(dead)
        return {rank: rank in dead for rank in view.all_worker_ranks() if rank not in taking_part}

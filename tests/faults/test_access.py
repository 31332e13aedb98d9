"""Who may send what, over real sockets: every message, under keys of every role, to a scheduler and a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvd
from kvd.client.cluster.observer import Observer
from kvd.config import load
from kvd.core.access import ROWS, Row
from kvd.core.principals import KeyRole, Principal
from kvd.errors import JobEnded, KvdError, NotAllowed
from kvd.node.keys.keyfiles import NodeKey, new_node_key, public_part, write_key
from kvd.protocol import messages as m
from kvd.protocol.messages import StatusQuery
from kvd.testing.cluster import LocalCluster, engine_of
from tests.core.access_harness import JOB, Sender, is_expected, message_of, tells_to_keep_out
from tests.faults.bad_input_harness import RawPeer

pytestmark = pytest.mark.keys
FENCE = 999


class Holder(NamedTuple):
    """Whose key it is, and what it may be."""

    roles: tuple[KeyRole, ...]
    jobs: tuple[str, ...] = ()

    def principal(self, name: str) -> Principal:
        """As the list of allowed keys has it."""
        return Principal(name, frozenset(self.roles), self.jobs or ("*",))


HOLDERS = {
    "rack": Holder((KeyRole.SERVER,)),
    "alice": Holder((KeyRole.WORKER,), ("train-*",)),
    "bob": Holder((KeyRole.WORKER,), ("train-*",)),
    "carol": Holder((KeyRole.WORKER,)),
    "dave": Holder((KeyRole.WORKER,), ("serve-*",)),
    "olga": Holder((KeyRole.OBSERVER,), ("train-*",)),
    "ops": Holder((KeyRole.OPERATOR,)),
}


class Keys:
    """A key file for each holder, and the list of them."""

    def __init__(self, folder: Path) -> None:
        self.allowed = folder / "allowed.toml"
        self.folder = folder
        scheduler = new_node_key("scheduler")
        self.keys: dict[str, NodeKey] = {"scheduler": scheduler}
        self.keys |= {name: new_node_key(name, scheduler.keypair.public) for name in HOLDERS}
        for name in self.keys:
            write_key(self.file(name), self.keys[name])
        self.allowed.write_text(
            "".join(public_part(self.keys[name], holder.roles, holder.jobs) for name, holder in HOLDERS.items())
        )

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def of(self, name: str) -> dict[str, str]:
        """The settings of a node that is not a daemon."""
        return {"keyfile": str(self.file(name))}


class Guarded(LocalCluster):
    """A cluster whose daemons have keys of their own."""

    def __init__(self, keys: Keys, num_workers: int) -> None:
        self.keys = keys
        super().__init__(num_workers, 1, job=JOB, allowed_keys=str(keys.allowed))

    def start(self, role: Any, **settings: Any) -> Any:
        name = "scheduler" if role == "scheduler" else "rack"
        return super().start(role, **self.keys.of(name), **settings)

    def observer_of(self, name: str, job: str = JOB) -> Observer:
        given = {"scheduler": self.address, "job": job, "request_timeout_s": 60.0, **self.keys.of(name)}
        return Observer(load(given, environ={}).config)


class Callers:
    """A socket for each holder of a key, to the scheduler and to the server."""

    def __init__(self, cluster: Guarded) -> None:
        server_key = cluster.keys.keys["rack"].keypair.public
        places = (
            (KeyRole.SCHEDULER, cluster.scheduler.address, ""),
            (KeyRole.SERVER, cluster.servers[0].address, server_key),
        )
        self.sockets = {
            (receiver, name): RawPeer(address, settings=cluster.keys.of(name), key=key)
            for receiver, address, key in places
            for name in HOLDERS
        }

    def answers(self, receiver: KeyRole, name: str, run: int, message: Any, sender: int) -> list[Any]:
        """All that comes before the answer to a question that is sent after the message."""
        peer = self.sockets[receiver, name]
        peer.run = run
        peer.say(message, *([b"\0"] if isinstance(message, m.Init) else []), sender=sender)
        peer.say(StatusQuery(FENCE), sender=sender)
        answers: list[Any] = []
        while True:
            answer = peer.answer()
            if getattr(answer, "request", 0) == FENCE:
                return answers
            answers.append(answer)

    def close(self) -> None:
        for peer in self.sockets.values():
            peer.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    cluster = Guarded(Keys(tmp_path_factory.mktemp("keys")), 2)
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def stores(cluster: Guarded) -> list[kvd.KVStore]:
    stores = cluster.open_stores(each=[cluster.keys.of(name) for name in ("alice", "bob")])
    for handle in [store.init_async("w", np.zeros(1, np.uint8)) for store in stores]:
        handle.wait()
    return stores


@pytest.fixture(scope="module")
def callers(cluster: Guarded) -> Iterator[Callers]:
    callers = Callers(cluster)
    yield callers
    callers.close()


def step(stores: list[kvd.KVStore]) -> None:
    """The job is at work, and its sums are right."""
    for handle in [store.pushpull_async("w", np.ones(1, np.uint8)) for store in stores]:
        assert handle.result(20).tolist() == [2]


def senders(stores: list[kvd.KVStore]) -> list[Sender]:
    """Holders of all keys who have not joined, and two who have the incarnation of the first worker."""
    strangers = [Sender(name, holder.principal(name), 5000 + n) for n, (name, holder) in enumerate(HOLDERS.items())]
    first = engine_of(stores[0]).machine.incarnation
    return [*strangers, *[Sender(name, HOLDERS[name].principal(name), first, steals=True) for name in ("bob", "olga")]]


def rows() -> list[Any]:
    receivers = (KeyRole.SCHEDULER, KeyRole.SERVER)
    return [
        pytest.param(receiver, row, kind, id=f"{receiver}-{row.doing}-{kind.__name__}")
        for receiver in receivers
        for row in ROWS[receiver]
        for kind in row.kinds
    ]


@pytest.mark.parametrize(("receiver", "row", "kind"), rows())
def test_each_key_may_do_what_the_table_says_and_no_more(
    callers: Callers, stores: list[kvd.KVStore], receiver: KeyRole, row: Row, kind: type[Any]
) -> None:
    run = engine_of(stores[0]).session.run
    for sender in senders(stores):
        is_allowed = is_expected(row, sender) and not (sender.steals and (receiver is KeyRole.SERVER or kind is m.Join))
        if is_allowed and kind in (m.Join, m.EndRun, m.Shutdown):
            continue  # it joins, or ends the job: tests of their own
        answers = callers.answers(receiver, sender.name, run, message_of(row, kind), sender.incarnation)
        if is_allowed and not answers:  # a command runs elsewhere
            answers = [callers.sockets[receiver, sender.name].answer()]
        assert all(map(tells_to_keep_out, answers)) != is_allowed, (sender, answers)
    step(stores)


def test_an_observer_s_key_reads_and_a_worker_s_key_ends_no_job(cluster: Guarded, stores: list[kvd.KVStore]) -> None:
    step(stores)
    with cluster.observer_of("olga") as observer:
        assert observer.pull("w").dtype == np.uint8
        listed = observer.keys()
        assert [key["key"] for key in listed] == ["w"]
        secrets = [f"{engine_of(store).machine.incarnation:x}" for store in stores]
        assert not any(secret in str(observer.status()) for secret in secrets)
        with pytest.raises(NotAllowed, match="key 'olga' allows to be observer"):
            observer.command("ping", b"")
    for name in ("alice", "olga"):
        with cluster.observer_of(name) as observer:
            with pytest.raises(NotAllowed, match="takes operator"):
                observer.end_job(JOB)
            with pytest.raises(NotAllowed, match="takes operator"):
                observer.shut_down(force=True)
    step(stores)


def test_a_worker_s_key_of_other_jobs_neither_reads_nor_joins(cluster: Guarded, stores: list[kvd.KVStore]) -> None:
    with pytest.raises(KvdError, match="key 'dave' allows to be worker of jobs serve-"):
        cluster.observer_of("dave")
    with pytest.raises(NotAllowed, match="key 'dave' allows to be worker of jobs serve-"):
        cluster.lone_store(**cluster.keys.of("dave"), join_timeout_s=20.0)
    step(stores)


def test_an_operator_s_key_ends_a_job_and_the_daemons(tmp_path: Path) -> None:
    cluster = Guarded(Keys(tmp_path), 1)
    with cluster:
        store = cluster.store(**cluster.keys.of("alice"))
        store.init("w", np.zeros(1, np.uint8))
        with cluster.observer_of("ops") as observer:
            observer.end_job(JOB)
            with pytest.raises(JobEnded):
                store.pull("w")
        with cluster.observer_of("ops") as observer:
            observer.shut_down(force=True)

"""Attacks on the daemons of a running job: no daemon ends, the job's result is the same, and nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.assault import Force
from tests.fuzz.attacks import FULL, Row, attack_with, attacks, table
from tests.fuzz.descriptors import with_many_descriptors
from tests.fuzz.target import MOST_GROWN_BYTES, Target, under_attack

SHORT = Force(peers=40, seconds=0.3, nbytes=1 << 20)


@pytest.fixture(scope="module")
def closed() -> Iterator[Target]:
    """With keys."""
    with under_attack(insecure=False) as target:
        yield target
        assert len(target.job.end()) == 1


@pytest.fixture(scope="module")
def opened() -> Iterator[Target]:
    """Without keys."""
    with under_attack(insecure=True) as target:
        yield target
        assert len(target.job.end()) == 1


def disturbs_nobody(target: Target, name: str) -> None:
    row = attack_with(target, name, SHORT)
    assert row.times
    assert row.holds, row


@pytest.mark.parametrize("name", attacks(insecure=False))
def test_an_attack_disturbs_nobody(closed: Target, name: str) -> None:
    disturbs_nobody(closed, name)


@pytest.mark.parametrize("name", attacks(insecure=True))
def test_an_attack_disturbs_nobody_without_keys(opened: Target, name: str) -> None:
    disturbs_nobody(opened, name)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("insecure", "name"), [(insecure, name) for insecure in (False, True) for name in attacks(insecure=insecure)]
)
def test_an_attack_with_all_force_disturbs_nobody(name: str, insecure: bool) -> None:
    with with_many_descriptors(), under_attack(insecure=insecure) as target:
        row = attack_with(target, name, FULL)
        print(table([row]))
        assert row.holds, row
        assert len(target.job.end()) == 1


def test_a_daemon_that_ends_or_forgets_is_noticed(closed: Target) -> None:
    """The suite would be worth little if it could not fail."""
    bad = Row("x", 1, [], "", 0, "server 0 keeps 1 GB", 0.0)
    assert not bad.holds
    assert not bad._replace(kept="", grown_bytes=MOST_GROWN_BYTES + 1).holds
    assert not bad._replace(kept="", ended=["server 0: -6"]).holds
    assert bad._replace(kept="").holds
    (used, *_) = closed.usage()
    assert used.is_back_at(used)
    assert not used._replace(descriptors=used.descriptors + 40).is_back_at(used)
    assert not used._replace(threads=used.threads + 1).is_back_at(used)
    assert not used._replace(resident_bytes=used.resident_bytes + (64 << 20)).is_back_at(used)

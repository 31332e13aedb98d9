"""Tests of the simulator: builds that are broken where values are encoded, delays compensated, keys merged in their own
way, or tables deleted and captured. A campaign must catch each within some seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.compression import TwoBit
from kvd.compute.slice_state import SliceState
from kvd.core.server import groups
from kvd.core.server.groups import FusedGroup
from kvd.core.server.rounds import SliceLog
from kvd.node.jobs import runner
from kvd.node.jobs.table_parts import TableParts
from kvd.tables.copies import PartWriter
from kvd.tables.stored_rows import RowPages
from tests.simulation.mutants_harness import check_caught
from tests.simulator.sparse import SPARSE


def what_is_left_over_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A plain round does not use up what encoding has left over."""
    patch.setattr(runner, "_use_up", lambda state, value: setattr(state, "residual", None))


def what_is_left_over_counts_again(patch: pytest.MonkeyPatch) -> None:
    """A plain round uses it up, and the next one has it again."""
    use_up = runner._use_up

    def keeping(state: SliceState, value: Any) -> None:
        residual = state.residual
        use_up(state, value)
        state.residual = residual

    patch.setattr(runner, "_use_up", keeping)


def copies_lack_what_is_left_over(patch: pytest.MonkeyPatch) -> None:
    """A server that becomes a backup is not sent it."""
    export = SliceState.export

    def without(state: SliceState) -> dict[str, Any]:
        return {name: array for name, array in export(state).items() if name != "residual"}

    patch.setattr(SliceState, "export", without)


def backups_leave_nothing_over(patch: pytest.MonkeyPatch) -> None:
    """A backup encodes without feedback."""
    encoded = runner.JobRunner._encoded

    def forgetful(runner: runner.JobRunner, job: Any, *rest: Any) -> Any:
        if job.is_merged:
            job = job._replace(encoding=job.encoding._replace(coding=job.encoding.coding._replace(feeds_back=False)))
        return encoded(runner, job, *rest)

    patch.setattr(runner.JobRunner, "_encoded", forgetful)


def sums_have_the_threshold_of_one(patch: pytest.MonkeyPatch) -> None:
    """The sum of three values has no larger threshold than each of them."""
    patch.setattr(TwoBit, "of_merged", lambda compressor, count: compressor)


def encoded_bytes_of_another_version(patch: pytest.MonkeyPatch) -> None:
    """What a version was decoded from stays when the next one comes."""
    commit = FusedGroup.commit

    def stale(group: FusedGroup, buffer: Any, encoded: Any = None) -> Any:
        before = group.slices[0].encoded.get(group.log.version)
        return commit(group, buffer, before or encoded)

    patch.setattr(FusedGroup, "commit", stale)


def keys_have_the_merge_of_the_cluster(patch: pytest.MonkeyPatch) -> None:
    """No key has a merge of its own."""
    patch.setattr(FusedGroup, "merge", "")


def fused_whatever_their_merges(patch: pytest.MonkeyPatch) -> None:
    """Slices are fused though they have different merges."""
    fused = groups.fused

    def careless(number: int, slices: Any) -> Any:
        with pytest.MonkeyPatch.context() as own:
            own.setattr(FusedGroup, "merge", "")
            return fused(number, slices)

    patch.setattr("kvd.core.server.keys.fused", careless)


def whatever_was_pulled_first(patch: pytest.MonkeyPatch) -> None:
    """A worker is taken for one that has what it has pulled first."""
    was_sent = SliceLog.was_sent

    def mutant(log: SliceLog, rank: int, version: int, kept: Any = None) -> None:
        before = log.progress_of(rank).kept
        was_sent(log, rank, version, kept if before is None else before)

    patch.setattr(SliceLog, "was_sent", mutant)


def whatever_is_newest(patch: pytest.MonkeyPatch) -> None:
    """No delay is compensated."""
    patch.setattr(FusedGroup, "keeps_pulled", False)


def fused_slices_forget_what_was_pulled(patch: pytest.MonkeyPatch) -> None:
    """Slices that are fused, or parted, begin as if nobody had pulled them."""
    patch.setattr(groups, "_kept_together", lambda slices, rank: None)


def rows_of_deleted_tables_stay(patch: pytest.MonkeyPatch) -> None:
    """A table that is deleted keeps its memory."""
    patch.setattr(TableParts, "forget", lambda *rest: None)


def captures_go_with_the_time(patch: pytest.MonkeyPatch) -> None:
    """The rows of a capture are not copied."""
    make: Callable[..., None] = RowPages.__init__

    def careless(pages: RowPages, table: Any, version: int, *, keeps: bool = False) -> None:
        make(pages, table, version)

    patch.setattr(RowPages, "__init__", careless)


def copies_lack_the_rows_before(patch: pytest.MonkeyPatch) -> None:
    """A server that becomes a backup has no rows as they were before the last updates."""
    part = PartWriter.part

    def without(writer: PartWriter) -> Any:
        writer._aside.clear()
        return part(writer)

    patch.setattr(PartWriter, "part", without)


def lost_pushes_stay_in_their_rounds(patch: pytest.MonkeyPatch) -> None:
    """A lost worker is told that its push does not count, but it stays in its round."""
    patch.setattr(SliceLog, "drop_unclosed", lambda log, rank: None)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (what_is_left_over_is_lost, "coded", "should be"),
    (what_is_left_over_counts_again, "coded", "should be"),
    (copies_lack_what_is_left_over, "coded, servers die", "finds another value|should be|of partition"),
    (backups_leave_nothing_over, "coded, servers die", "finds another value|should be|of partition"),
    (sums_have_the_threshold_of_one, "coded", "should be"),
    (encoded_bytes_of_another_version, "coded", "should be"),
    (keys_have_the_merge_of_the_cluster, "coded", "should be"),
    (fused_whatever_their_merges, "merges, nasty", "has other bits"),
    (whatever_was_pulled_first, "delays", "elements of rank"),
    (whatever_is_newest, "delays", "elements of rank"),
    (fused_slices_forget_what_was_pulled, "delays", "elements of rank"),
    (rows_of_deleted_tables_stay, "deletions, tables", "still has states"),
    (captures_go_with_the_time, "captured tables", "a snapshot of step|the pushes make it"),
    (copies_lack_the_rows_before, "captured tables, servers die", ""),
    (lost_pushes_stay_in_their_rounds, "losses, tables", ""),
]


QUICK = (
    sums_have_the_threshold_of_one,
    fused_whatever_their_merges,
    whatever_was_pulled_first,
    whatever_is_newest,
    fused_slices_forget_what_was_pulled,
)  # the others run under -m soak


@pytest.mark.parametrize(
    ("mutate", "campaign", "complaint"),
    [
        pytest.param(*mutant, id=mutant[0].__name__, marks=() if mutant[0] in QUICK else pytest.mark.soak)
        for mutant in MUTANTS
    ],
)
@pytest.mark.timeout(600)
def test_mutant_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(mutate, SPARSE[campaign], complaint, monkeypatch)

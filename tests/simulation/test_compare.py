"""Tests of the comparison of two builds: copies of this one, and broken copies."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import kvd
from kvd.protocol.messages import Epoch, ErrorCode, Refused, Taken
from kvd.protocol.specs import KeySpec
from tests.simulation import compare
from tests.simulation.compare import Cache, first_difference
from tests.simulation.mutant_list import mutants_of
from tests.simulation.one_build import LAYOUTS, Task, described

ROOT = Path(__file__).resolve().parents[2]
CAMPAIGN = next(
    path for layout in LAYOUTS if (path := Path(*layout.split("."), "campaign.py")) and (ROOT / path).exists()
)
OTHER_PLACES = """
_shard_of = shard_of

def shard_of(key: str, slice_index: int, num_shards: int) -> int:
    return (_shard_of(key, slice_index, num_shards) + 1) % num_shards
"""


def copied(to: Path) -> Path:
    """Make a copy of what the simulator needs."""
    package = CAMPAIGN.parts[0]
    for name in {"kvd", package}:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # being written
    return to


def append(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(text)


def said(base: Path, new: Path, *options: str) -> tuple[int, str]:
    """Compare two builds and return the exit code and all lines."""
    lines: list[str] = []
    trees = ["--base", str(base), "--new", str(new), "--cache", str(new.parent / "cache")]
    code = compare.main([*trees, *options], lines.append)
    return code, "\n".join(lines)


@pytest.mark.timeout(600)
def test_equal_builds_and_planted_differences(tmp_path: Path) -> None:
    base, new = copied(tmp_path / "base"), copied(tmp_path / "new")
    code, text = said(base, new, "--campaigns", "ledger", "late", "--jobs", "2")
    assert code == 0, text
    assert "2 of 2 runs are equal" in text
    assert "not kept" in text

    append(new / "kvd" / "core" / "placement.py", OTHER_PLACES)  # slices are led by other servers
    code, text = said(base, new, "--campaigns", "ledger", "meetings")
    assert code == 1
    assert "ledger, seed 0: another run" in text
    assert "meetings, seed 0" not in text  # they have no keys
    assert "1 of 2 runs are equal" in text
    before, after = [next(line for line in text.splitlines() if line.startswith(sign)) for sign in ("  - ", "  + ")]
    assert before[4:] != after[4:]

    code, text = said(base, new, "--campaigns", "rounds", "--outcomes")  # which nobody notices in the end
    assert code == 0, text
    assert "1 of 1 calm runs end with the same" in text

    append(new / CAMPAIGN, "\nSTEPS += 1\n")  # programs push once more
    code, text = said(base, new, "--campaigns", "rounds", "--outcomes")
    assert code == 1
    assert "messages: PushBatch: " in text


@pytest.mark.timeout(600)
def test_a_broken_promise_and_a_broken_build_are_reported(tmp_path: Path) -> None:
    new = copied(tmp_path / "new")
    append(new / CAMPAIGN, "\nundisturbed_weights = lambda workload: b''\n")
    code, text = said(ROOT, new, "--campaigns", "training", "no such", "--outcomes")
    assert code == 1
    assert "the weights differ from those of an undisturbed run" in text
    assert "base: no violation" in text
    assert "0 of 1 runs break no promise that the base keeps" in text
    assert "the campaign 'no such' is not in both builds" in text
    append(new / CAMPAIGN, "\nraise ValueError('a broken tree')\n")
    code, text = said(ROOT, new, "--campaigns", "training")
    assert code == 1
    assert "a broken tree" in text


def test_a_tree_without_kvd_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--base", str(tmp_path)])
    assert "has no package kvd" in capsys.readouterr().err


def test_results_of_a_clean_worktree_are_kept(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    (tree / "file").write_text("1")
    assert compare.commit_of(tree) is None
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = compare.commit_of(tree)
    assert commit is not None
    assert compare.commit_of(tmp_path) is None
    (tree / "file").write_text("2")
    assert compare.commit_of(tree) is None

    one, two, folder = Task("digest", "ledger", 0), Task("digest", "ledger", 1), tmp_path / "cache"
    cache, other = Cache(folder, commit), Cache(folder, commit)
    cache.keep({one: {"digest": "a"}})
    other.keep({two: {"digest": "b"}})
    again = Cache(folder, commit)
    assert (again.find(one), again.find(two)) == ({"digest": "a"}, {"digest": "b"})
    assert Cache(folder, "0" * 40).find(one) is None
    Cache(folder, None).keep({one: {}})
    assert len(list(folder.iterdir())) == 1


def test_the_first_difference_has_lines_around_it() -> None:
    lines = [str(number) for number in range(30)]
    shown = list(first_difference(lines, [*lines[:20], "x"]))
    assert shown[0].endswith("line 21:")
    assert shown[1:] == [*[f"    {n}" for n in range(12, 20)], *[f"  - {n}" for n in range(20, 24)], "  + x"]


def test_a_field_that_only_one_build_has_does_not_count_while_it_has_its_default() -> None:
    spec = KeySpec("float32", (3,), 4096)
    assert described(Refused(7, ErrorCode.NOT_ALLOWED, "no", taken=Taken.KEPT)) == (
        "Refused(request=7, error=<ErrorCode.NOT_ALLOWED: 4>, text='no', taken=<Taken.KEPT: 2>)"
    )
    assert described((spec, [Epoch(1, 2)])) == (
        "(KeySpec(dtype='float32', shape=(3), slice_bytes=4096), (Epoch(generation=1, change=2)))"
    )


def test_a_mutant_that_is_gone_is_named(tmp_path: Path) -> None:
    source = """
def first(patch: pytest.MonkeyPatch) -> None:
    \"\"\"The first.

    More.\"\"\"
    patch.setattr(Some, "thing", 1)

def helper(patch: pytest.MonkeyPatch) -> Check:
    patch.setattr(Some, "watched", 1)

MUTANTS = {"a name": lambda patch: patch.setattr("a.b", 2)}
USED = [first, first]
"""
    for name in ("base", "new"):
        (tmp_path / name / "kvd").mkdir(parents=True)
        (tmp_path / name / "kvd" / "errors.py").touch()
        (tmp_path / name / "tests" / "simulation").mkdir(parents=True)
    (tmp_path / "base" / "tests" / "simulation" / "test_x.py").write_text(source)
    file = tmp_path / "new" / "tests" / "simulation" / "test_y.py"
    file.write_text(source.replace('Some, "thing"', 'Other, "thing"'))
    found = [(mutant.name, mutant.uses, mutant.targets, mutant.meaning) for mutant in mutants_of(tmp_path / "base")]
    assert sorted(found) == [("a name", 1, ("a.b",), ""), ("first", 2, ("Some.thing",), "The first.")]
    code, text = said(tmp_path / "base", tmp_path / "new", "--mutants")
    assert code == 0
    assert "moved: first: Some.thing → Other.thing" in text
    file.write_text(source.replace("a name", "another").replace("[first, first]", "[first]"))
    code, text = said(tmp_path / "base", tmp_path / "new", "--mutants")
    assert code == 1
    assert "DROPPED: a name: 1 → 0" in text
    assert "fewer uses: first: 2 → 1" in text


def test_every_mutant_is_used() -> None:
    """Also those of this build: one that no test names is no mutant."""
    assert Path(str(kvd.__file__)).resolve().parents[1] == ROOT
    unused = [mutant.name for mutant in mutants_of(ROOT) if not mutant.uses]
    assert unused == []
    assert len(mutants_of(ROOT)) > 100

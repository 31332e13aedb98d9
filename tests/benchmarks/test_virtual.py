"""Clusters in virtual time, whose times can be worked out by hand."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path

import pytest

from benchmarks import simulate
from benchmarks.simulate import network
from benchmarks.virtual.cluster import Plan, Prediction, foretell
from benchmarks.virtual.costs import Costs, SchedulerCosts, ServerCosts, WorkerCosts, read_costs, write_costs
from benchmarks.virtual.fitting import Sample, fit
from benchmarks.virtual.hosts import Pipe
from benchmarks.virtual.memory import Ledger, Memory
from benchmarks.virtual.network import PACKET_NBYTES, PACKET_OVERHEAD_NBYTES, Rates, wire_nbytes

MB = 1_000_000
NOTHING = Costs(
    WorkerCosts(0.0, 0.0, 0.0, 0.0), ServerCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), SchedulerCosts(0.0, 0.0), 0.0, 1e15
)
"""Of a machine that takes no time for anything."""

EACH = Costs(
    WorkerCosts(100e-6, 5e-6, 30e-6, 0.1e-9, 10e-6),
    ServerCosts(20e-6, 0.4e-6, 0.2e-6, 0.3e-9, 90e-6, 0.07e-9, 0.06e-9, 20e-6),
    SchedulerCosts(20e-6, 0.05e-6),
    20e-6,
    30e9,
)
GIGABYTE_PER_S = Rates(1e9, 0.0)
OVERHEAD = 1 + PACKET_OVERHEAD_NBYTES / PACKET_NBYTES


def floats(nbytes: int) -> tuple[int, ...]:
    return (nbytes // 4,)


def between_hosts(workers: int, servers: int, nbytes: int, rates: Rates = GIGABYTE_PER_S, steps: int = 2) -> Prediction:
    """Of machines that take no time, a network does."""
    return foretell(Plan(workers, servers, floats(nbytes), steps, 1, network=rates), NOTHING)


# ── processors ──


def test_keys_cost_more_after_another_process_had_the_core() -> None:
    """Of a worker with a core for itself nothing is forgotten, whatever it would cost. On one core the server runs
    between the beginning and the end of each call, and so does the other worker."""
    costs = dataclasses.replace(NOTHING, worker=WorkerCosts(0.0, 1e-6, 0.0, 0.0, 0.0, 3e-6))
    alone = foretell(Plan(1, 1, (1,) * 100, 2, 2), costs)
    assert alone.workers.cpu_s == pytest.approx(100e-6)
    assert alone.workers.counts.get("cold_key_s", 0) == 0
    shared = foretell(Plan(2, 1, (1,) * 100, 2, 1), costs)
    assert shared.workers.counts["key_s"] == 100
    assert 50 <= shared.workers.counts["cold_key_s"] <= 100
    assert shared.workers.cpu_s == pytest.approx(100e-6 + 3e-6 * shared.workers.counts["cold_key_s"])


def test_a_worker_tidies_up_while_the_server_works() -> None:
    """100 keys of 3 us, of which 1 us each comes when the message has left, and a server that takes 50 us, or 150."""
    for round_s, step_s in ((50e-6, 200e-6 + 100e-6), (150e-6, 200e-6 + 150e-6)):
        server = dataclasses.replace(NOTHING.server, round_s=round_s)
        costs = dataclasses.replace(NOTHING, worker=WorkerCosts(0.0, 3e-6, 0.0, 0.0, late_key_s=1e-6), server=server)
        found = foretell(Plan(1, 1, (1,) * 100, 2, 2), costs)
        assert found.step_s == pytest.approx(step_s)
        assert found.workers.cpu_s == pytest.approx(300e-6)


# ── the network ──


def test_a_value_is_pushed_and_pulled_at_the_speed_of_the_network() -> None:
    """1 GB in messages of four slices of 4 MiB at 1 GB/s: the values of a message travel back while the next one is
    pushed, so both take one second, and a message more."""
    message_s = 4 * 4 * 1024 * 1024 * OVERHEAD / 1e9
    found = between_hosts(1, 1, 1000 * MB)
    assert found.step_s == pytest.approx(1.0 * OVERHEAD + message_s, rel=0.002)
    assert found.servers.port_share == pytest.approx(OVERHEAD / (OVERHEAD + message_s), abs=0.01)


def test_a_value_of_one_slice_goes_there_and_back() -> None:
    found = between_hosts(1, 1, 4 * MB, Rates(1e9, 0.01))
    assert found.step_s == pytest.approx(2 * (0.004 * OVERHEAD + 0.01), rel=0.001)


def test_workers_share_the_port_of_the_server() -> None:
    one, two = (between_hosts(workers, 1, 500 * MB).step_s for workers in (1, 2))
    assert two / one == pytest.approx(2.0, rel=0.02)


def test_servers_share_the_work() -> None:
    one, four = (between_hosts(4, servers, 400 * MB).step_s for servers in (1, 4))
    assert one / four == pytest.approx(4.0, rel=0.05)


def test_short_messages_do_not_wait_for_long_ones_of_other_connections() -> None:
    """A barrier of workers whose ports are free takes a round trip to the scheduler."""
    found = between_hosts(2, 1, 4 * MB, Rates(1e9, 0.001))
    assert 0.002 <= found.barrier_s < 0.0025


def test_packets_have_headers() -> None:
    assert wire_nbytes(1) == 1 + PACKET_OVERHEAD_NBYTES
    assert wire_nbytes(10 * PACKET_NBYTES) == 10 * (PACKET_NBYTES + PACKET_OVERHEAD_NBYTES)


# ── one host ──


def within_host(workers: int, nbytes: int, costs: Costs, cores: int, steps: int = 4) -> Prediction:
    return foretell(Plan(workers, 1, floats(nbytes), steps, cores), costs)


def test_memory_bounds_a_host_however_many_cores_it_has() -> None:
    """Each byte of a worker is copied in and out (4), and merged (1); a new version is written (1)."""
    costs = dataclasses.replace(NOTHING, memory_bytes_per_s=10e9)
    for workers in (1, 4):
        found = within_host(workers, 100 * MB, costs, cores=8)
        assert found.step_s == pytest.approx((5 * workers + 1) * 0.1 / 10, rel=0.02)
        assert found.memory_share == pytest.approx(1.0, abs=0.02)


def test_workers_share_the_cores() -> None:
    """A worker takes 2 · 10 ms of a core for its bytes, and the server nothing."""
    costs = dataclasses.replace(NOTHING, worker=dataclasses.replace(NOTHING.worker, byte_s=1e-9))
    one, eight = within_host(1, 10 * MB, costs, cores=4), within_host(8, 10 * MB, costs, cores=4)
    assert one.step_s == pytest.approx(0.02, rel=0.01)
    assert one.workers.cpu_s == pytest.approx(0.02, rel=0.01)
    assert eight.step_s == pytest.approx(8 * 0.02 / 4, rel=0.1)


def test_a_small_call_waits_for_each_of_its_parts() -> None:
    """One worker and one server with a core each: nothing is done at the same time."""
    worker, server = EACH.worker, EACH.server
    worker_s = worker.call_s + worker.key_s + 2 * worker.message_s + 2 * 1024 * worker.byte_s
    server_s = 2 * server.message_s + server.round_s + server.slice_s
    server_s += 1024 * (server.merged_byte_s + server.version_byte_s)
    found = within_host(1, 1024, EACH, cores=2)
    assert found.workers.cpu_s == pytest.approx(worker_s, rel=0.01)
    assert found.servers.cpu_s == pytest.approx(server_s, rel=0.03)  # the scheduler may have had its core
    assert found.step_s == pytest.approx(worker_s + server_s + 2 * EACH.wake_s, rel=0.03)


def test_a_server_keeps_two_versions_and_what_is_staged() -> None:
    """Pushes of other hosts lie in its own memory until they are merged."""
    plan = Plan(2, 1, floats(4 * MB), 3, 1, network=Rates(1e9, 0.0), slice_bytes=4 << 20)
    versions, pushes = 3 * 4 * MB, 2 * 4 * MB
    assert versions <= foretell(plan, NOTHING).servers.memory_nbytes <= versions + pushes
    here = dataclasses.replace(plan, network=None)
    assert foretell(here, NOTHING).servers.memory_nbytes <= versions


# ── everything ──


def test_the_same_cluster_is_foretold_in_the_same_way() -> None:
    plan = Plan(3, 2, (5000, 300, 7), 3, 2, network=Rates(1e8, 1e-4))
    assert foretell(plan, EACH) == foretell(plan, EACH)


def test_all_workers_join_and_the_scheduler_is_counted() -> None:
    few, many = (between_hosts(workers, 1, 1024) for workers in (4, 40))
    assert 0 < few.scheduler_nbytes < many.scheduler_nbytes
    costs = dataclasses.replace(NOTHING, scheduler=SchedulerCosts(1e-3, 0.0))
    slow = foretell(Plan(4, 1, (16,), 2, 1, network=GIGABYTE_PER_S), costs)
    assert slow.scheduler_join_cpu_s > 10e-3
    assert slow.joined_s > few.joined_s


def test_memory_counts_until_the_last_reference_is_gone() -> None:
    ledger = Ledger()
    first = Memory(10, ledger)
    both = [first, Memory(5, ledger)]
    assert (ledger.nbytes, ledger.peak_nbytes) == (15, 15)
    both.clear()
    gc.collect()
    assert ledger.nbytes == 10
    del first
    assert (ledger.nbytes, ledger.peak_nbytes) == (0, 15)


def test_a_pipe_passes_one_thing_after_the_other() -> None:
    pipe = Pipe(100.0)
    assert pipe.take(1.0, 50) == 1.5
    assert pipe.take(1.0, 100) == 2.5
    assert pipe.take(10.0, 100) == 11.0
    assert pipe.nbytes == 250


# ── costs ──


def test_costs_are_found_in_what_they_explain() -> None:
    truth = {"message_s": 30e-6, "byte_s": 0.1e-9}
    counts = [
        {"message_s": 2.0, "byte_s": 1e3},
        {"message_s": 100.0, "byte_s": 1e6},
        {"message_s": 30.0, "byte_s": 1e8},
    ]
    samples = [Sample(each, sum(truth[name] * number for name, number in each.items())) for each in counts]
    assert fit(samples, list(truth)) == pytest.approx(truth, rel=1e-3)
    assert fit(samples, ["byte_s"], {"message_s": 30e-6}) == pytest.approx({"byte_s": 0.1e-9}, rel=1e-3)


def test_no_cost_is_negative() -> None:
    samples = [Sample({"a": 1, "b": 1}, 1.0), Sample({"a": 1, "b": 2}, 0.5)]
    assert min(fit(samples, ["a", "b"]).values()) == 0.0


def test_costs_are_kept_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    write_costs(file, {"auto": EACH, "tcp": NOTHING})
    assert read_costs(str(file)) == {"auto": EACH, "tcp": NOTHING}
    file.write_text('{"auto": {"worker": 3}}')
    with pytest.raises(ValueError, match="no costs"):
        read_costs(str(file))


# ── the command ──


def test_the_command_prints_and_writes_what_it_foretells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_costs(costs := tmp_path / "costs.json", {"sealed": EACH})
    out = tmp_path / "out.json"
    arguments = ["--costs", str(costs), "--work", "4KiB,1MiB", "--workers", "2,3", "--servers", "2", "--steps", "2"]
    assert simulate.main([*arguments, "--network", "1Gb/s,50us", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [(found["work"], found["plan"]["workers"]) for found in document["clusters"]] == [
        ("4KiB", 2),
        ("4KiB", 3),
        ("1MiB", 2),
        ("1MiB", 3),
    ]
    shown = capsys.readouterr().out
    assert [line.split()[:3] for line in shown.splitlines() if line.startswith("1MiB")] == [
        ["1MiB", "2", "2"],
        ["1MiB", "3", "2"],
    ]
    assert str(tmp_path) not in out.read_text()


def test_networks_are_read() -> None:
    fast, slow = network("10Gb/s,50us"), network("100Mb/s")
    assert (fast.bytes_per_s, fast.latency_s) == pytest.approx((1.25e9, 50e-6))
    assert (slow.bytes_per_s, slow.latency_s) == (12.5e6, 0.0)


@pytest.mark.parametrize(
    "arguments",
    [["--network", "fast"], ["--network", "0Gb/s"], ["--workers", "0"], ["--costs", "nowhere.json"], ["--way", "x"]],
)
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        simulate.main(arguments)
    assert arguments[0] in capsys.readouterr().err

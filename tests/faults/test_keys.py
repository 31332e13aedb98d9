"""Wrong keys: everyone is told at once what is wrong and what to do, and nobody comes in who should not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from kvd.node.keys.keyfiles import key_text, new_cluster_key, new_node_key, read_key, write_key
from kvd.testing.cluster import ProcessNode, wait_until
from tests.faults.keys_harness import DEADLINE_S, GuardedCluster, Keys, cleaned, kvd

pytestmark = pytest.mark.keys


@pytest.fixture
def homes(tmp_path: Path) -> dict[str, str]:
    """Two users of one host; the first has a key."""
    write_key(tmp_path / "ann" / "kvd" / "cluster.key", new_cluster_key())
    (tmp_path / "bob").mkdir()
    return {name: str(tmp_path / name) for name in ("ann", "bob")}


@pytest.fixture
def scheduler(homes: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The first user's."""
    node = lone_scheduler(tmp_path, keyfile=f"{homes['ann']}/kvd/cluster.key")
    yield node.address
    node.stop()


@pytest.fixture
def open_scheduler(tmp_path: Path) -> Iterator[str]:
    """One without keys."""
    node = lone_scheduler(tmp_path, insecure=True)
    yield node.address
    node.stop()


def lone_scheduler(folder: Path, **settings: object) -> ProcessNode:
    given = {"bind": "tcp://127.0.0.1:0", "num_workers": 1, "num_servers": 1, **settings}
    return ProcessNode("scheduler", given, folder, folder / "scheduler.log")


# --- other keys, and none --------------------------------------------------------------------------------------------


def test_the_second_user_of_a_host_is_told_that_he_has_no_key(scheduler: str, homes: dict[str, str]) -> None:
    said = kvd("status", "-S", scheduler, code=2, XDG_CONFIG_HOME=homes["bob"]).stderr
    assert said.startswith(
        f"error: there is no key at {homes['bob']}/kvd/cluster.key: the first scheduler of this user"
    )
    assert not os.listdir(homes["bob"])


@pytest.mark.parametrize("command", [("status",), ("push", "w", "x.npy"), ("server",)], ids=" ".join)
def test_the_second_user_of_a_host_is_told_which_key_he_has_and_what_to_do(
    command: tuple[str, ...], scheduler: str, homes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", "import numpy; numpy.save('x.npy', numpy.ones(3))"], check=True)
    own = Path(homes["bob"]) / "kvd" / "cluster.key"
    write_key(own, new_cluster_key())
    said = kvd(*command, "-S", scheduler, code=3, XDG_CONFIG_HOME=homes["bob"]).stderr
    assert f"the scheduler at {scheduler} has another key than this process, which has the key {own}" in said
    assert f"(public key {read_key(own).keypair.public[:8]}…)" in said
    assert "name the scheduler's key with --keyfile (KVD_KEYFILE), or import it" in said
    kvd("jobs", "-S", scheduler, "--keyfile", f"{homes['ann']}/kvd/cluster.key", XDG_CONFIG_HOME=homes["bob"])


def test_without_a_key_at_a_scheduler_that_has_one(scheduler: str) -> None:
    said = kvd("status", "-S", scheduler, "--insecure", code=3).stderr
    assert f"the scheduler at {scheduler} expects a key, and this process runs without (--insecure" in said


def test_with_a_key_at_a_scheduler_that_has_none(open_scheduler: str, homes: dict[str, str]) -> None:
    said = kvd("status", "-S", open_scheduler, code=3, XDG_CONFIG_HOME=homes["ann"]).stderr
    assert f"the scheduler at {open_scheduler} runs without keys (--insecure), and this process has the key" in said
    said = kvd("status", "-S", open_scheduler, "--insecure", code=1).stderr  # no server is there
    assert "insecure: this cluster has no keys" in said


def test_a_program_is_told_the_same(scheduler: str, homes: dict[str, str]) -> None:
    program = "import kvd\ntry:\n    kvd.create('dist_sync')\nexcept kvd.ConnectError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=cleaned(KVD_SCHEDULER=scheduler, KVD_INSECURE="1", KVD_JOIN_TIMEOUT_S="3600"),
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert f"the scheduler at {scheduler} expects a key" in done.stdout, done


# --- key files that cannot be used -----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["scheduler", "server", "status", "worker"])
def test_a_bad_key_file_ends_each_process_at_once(role: str, tmp_path: Path) -> None:
    (tmp_path / "open.key").write_text(key_text(new_cluster_key()))
    (tmp_path / "open.key").chmod(0o644)
    sizes = ["--num-workers", "1", "--num-servers", "1"] if role == "scheduler" else []
    command = ["--", sys.executable, "-c", "import kvd; kvd.create('dist_sync')"] if role == "worker" else []
    flags = ["-S", "tcp://127.0.0.1:1", "--keyfile", str(tmp_path / "open.key")]
    done = subprocess.run(
        [sys.executable, "-m", "kvd_cli.main", role, *flags, *sizes, *command],
        env=cleaned(), capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if role == "worker" else 2), done
    assert f"the key file {tmp_path}/open.key can be read by other users (mode 644)" in done.stderr


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("scheduler", "is the key of one node, and a scheduler with such a key needs to know whom it lets in: name a"),
        ("server", "is the key of one node, and a server with such a key needs to know whom it lets in: name a list"),
        ("status", "does not say what the scheduler's public key is: make it with kvd keypair new"),
    ],
)
def test_a_key_of_one_node_where_it_does_not_suffice(role: str, says: str, tmp_path: Path) -> None:
    write_key(tmp_path / "a.key", new_node_key("a"))
    sizes = ["--num-workers", "1", "--num-servers", "1"] if role == "scheduler" else []
    said = kvd(role, *sizes, "-S", "tcp://127.0.0.1:1", "--keyfile", str(tmp_path / "a.key"), code=2).stderr
    assert says in said


def test_a_clusters_key_where_only_keys_of_nodes_come_in(guarded: GuardedCluster, tmp_path: Path) -> None:
    write_key(tmp_path / "cluster.key", new_cluster_key())
    said = kvd("jobs", "-S", guarded.address, "--keyfile", str(tmp_path / "cluster.key"), code=3).stderr
    assert "has another key than this process" in said


def test_the_first_scheduler_of_a_user_makes_the_key(homes: dict[str, str], tmp_path: Path) -> None:
    file = Path(homes["bob"]) / "kvd" / "cluster.key"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "kvd_cli.main", "scheduler", "--num-workers", "1", "--num-servers", "1",
             "--bind", "tcp://127.0.0.1:0", "--ready-file", str(tmp_path / f"ready-{number}")],
            env=cleaned(XDG_CONFIG_HOME=homes["bob"]), stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        for number in range(2):
            ready = tmp_path / f"ready-{number}"
            wait_until(ready.exists, "the scheduler is ready")
            kvd("jobs", "-S", ready.read_text().strip(), XDG_CONFIG_HOME=homes["bob"])
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=DEADLINE_S)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in file.parent.iterdir()] == ["cluster.key"]


def test_a_scheduler_without_a_home_folder(tmp_path: Path) -> None:
    sizes = ["--num-workers", "1", "--num-servers", "1"]
    said = kvd("scheduler", *sizes, code=2, XDG_CONFIG_HOME="relative", HOME="relative").stderr
    assert "this user has no home folder for a key: name a key file with --keyfile" in said


# --- the list of allowed keys ----------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path)
    made.make("scheduler", "scheduler")
    made.make("server-0", "server")
    made.make("trainer", "worker", jobs=["vision-*"])
    made.make("reader", "observer")
    made.make("admin", "operator")
    made.allow("scheduler", "server-0", "trainer", "reader", "admin")
    return made


@pytest.fixture
def guarded(keys: Keys, tmp_path: Path) -> Iterator[GuardedCluster]:
    cluster = GuardedCluster(keys, tmp_path)
    yield cluster
    cluster.close()


GOOD = '[a]\nkey = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"\nroles = ["worker"]\n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[a", "is not TOML"),
        ("\x00", "is not TOML"),
        ("x = " + "[" * 100_000, "is not TOML"),
        ("key = 1", "has a line key outside of the table of a key: each key has a table [NAME]"),
        ("[a]\nroles = ['worker']", "[a] needs key = a public key of 40 characters"),
        ("[a]\nkey = '" + "#" * 40 + "'\nroles = ['worker']", "[a] needs key = a public key of 40 characters"),
        (GOOD.replace("worker", "king"), "[a] needs roles = a list of some of scheduler, server, worker, observer"),
        (GOOD.replace('["worker"]', "[]"), "[a] needs roles = a list of some of"),
        (GOOD.replace('["worker"]', "[[1]]"), "[a] needs roles = a list of some of"),
        (GOOD + "jobs = [1]", "[a] has jobs that are no list of up to 64 patterns"),
        (GOOD + "job = 'a'", "[a] has job, which means nothing: there are key, roles and jobs"),
        (GOOD + GOOD.replace("[a]", "[b]"), "a and b have the same key"),
        (GOOD + GOOD, "is not TOML"),
        ("# long\n" * 200_000, "is too long: at most 4096 keys"),
    ],
)
def test_a_wrong_list_ends_a_scheduler_at_its_start(content: str, says: str, keys: Keys) -> None:
    keys.allowed.write_text(content)
    flags = ["--keyfile", keys.file("scheduler"), "--allowed-keys", str(keys.allowed)]
    said = kvd("scheduler", "--num-workers", "1", "--num-servers", "1", *flags, code=2).stderr
    assert f"the list of allowed keys {keys.allowed}: " in said
    assert says in said.replace('\\"', '"')
    assert "Traceback" not in said


def test_a_list_that_others_may_change_or_that_is_not_there(keys: Keys) -> None:
    flags = ["--num-workers", "1", "--num-servers", "1", "--keyfile", keys.file("scheduler"), "--allowed-keys"]
    keys.allowed.chmod(0o666)
    said = kvd("scheduler", *flags, str(keys.allowed), code=2).stderr
    assert f"can be changed by other users: chmod 644 {keys.allowed}" in said
    for path, why in (("/no/such/list", "No such file or directory"), ("/", "Is a directory")):
        assert f"cannot be read ({why})" in kvd("scheduler", *flags, path, code=2).stderr


def test_a_broken_list_changes_nothing_and_the_log_says_so(guarded: GuardedCluster) -> None:
    guarded.keys.allowed.write_text("[a")
    guarded.reload("received SIGHUP, and went on with the keys as they were")
    assert "is not TOML" in guarded.nodes["scheduler"].log.read_text()
    guarded.kvd("reader", "jobs")


def test_a_key_that_is_struck_off_is_refused_and_one_that_is_added_comes_in(guarded: GuardedCluster) -> None:
    guarded.keys.make("late", "observer")
    for name, code in (("reader", 0), ("late", 3)):
        guarded.kvd(name, "jobs", code=code)
    guarded.keys.allow("scheduler", "server-0", "late")
    guarded.reload("3 keys are allowed now")
    guarded.kvd("late", "jobs")
    said = guarded.kvd("reader", "jobs", code=3).stderr
    assert f"does not let this process in, which has the key {guarded.keys.file('reader')}" in said
    assert f"(public key {guarded.keys.public('reader')[:8]}…): add its public key to the scheduler's list" in said
    assert "send the scheduler SIGHUP" in said


def test_a_server_that_is_not_allowed_ends_and_one_that_is_allowed_then_comes_in(guarded: GuardedCluster) -> None:
    guarded.keys.allow("scheduler", "trainer", "reader", "admin")
    guarded.reload("4 keys are allowed now")
    guarded.nodes.pop("server-0").kill()
    flags = ["-S", guarded.address, "--keyfile", guarded.keys.file("server-0")]
    said = kvd("server", *flags, "--allowed-keys", str(guarded.keys.allowed), code=3).stderr
    assert f"does not let this process in, which has the key {guarded.keys.file('server-0')}" in said
    guarded.keys.allow("scheduler", "server-0", "trainer", "reader", "admin")
    guarded.reload("5 keys are allowed now")
    guarded.start("server-0", "server", scheduler=guarded.address)
    # it is there, in the place of the one that was killed
    wait_until(lambda: "joined as server 0" in guarded.nodes["server-0"].log.read_text(), "it joins")


# --- roles -----------------------------------------------------------------------------------------------------------

TRAIN = """
import numpy as np, kvd, sys
with kvd.create("dist_sync") as kv:
    kv.init("w", np.zeros(3, np.float32))
    print(kv.pushpull("w", np.ones(3, np.float32)).tolist(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def worker(guarded: GuardedCluster) -> Iterator[subprocess.Popen[str]]:
    """A worker that has trained, and ends with its stdin."""
    settings = {"KVD_SCHEDULER": guarded.address, "KVD_KEYFILE": guarded.keys.file("trainer"), "KVD_JOB": "vision-1"}
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN], env=cleaned(**settings), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[1.0, 1.0, 1.0]\n"
    yield process
    process.kill()
    process.communicate()


def test_what_only_an_operator_may(guarded: GuardedCluster, worker: subprocess.Popen[str]) -> None:
    for name, command in product(("trainer", "reader"), (("jobs", "end", "vision-1"), ("shutdown", "--force"))):
        said = guarded.kvd(name, *command, "--job", "vision-1", code=1).stderr
        assert f"error: key {name!r}" in said
        assert "operator" in said
    assert "vision-1" in guarded.kvd("reader", "jobs").stdout
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 0, "nothing has happened to the job"


def test_an_operator_ends_jobs_and_daemons(guarded: GuardedCluster, worker: subprocess.Popen[str]) -> None:
    guarded.kvd("admin", "jobs", "end", "vision-1")
    worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 1, "its job has ended"
    guarded.kvd("admin", "shutdown")
    for node in guarded.nodes.values():
        assert node.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(("name", "job"), [("trainer", "audio-1"), ("reader", "vision-1")])
def test_who_does_not_train(name: str, job: str, guarded: GuardedCluster) -> None:
    settings = {"KVD_SCHEDULER": guarded.address, "KVD_KEYFILE": guarded.keys.file(name), "KVD_JOB": job}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN],
        env=cleaned(**settings), capture_output=True, text=True, timeout=DEADLINE_S, check=False, input="",
    )  # fmt: skip
    assert done.returncode == 1
    assert f"kvd.errors.NotAllowed: key {name!r} allows to be " in done.stderr, done.stderr

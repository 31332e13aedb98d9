"""Waiting for the scheduler: why it does not answer, when that is said, and what to do.

ZeroMQ tries a connection that fails again for ever, in silence. Handshakes of our own show the reason.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, TypeVar

from kvd.config import Config, parse_address
from kvd.core.session import SchedulerSession
from kvd.errors import ConnectError
from kvd.node.keys.keyring import missing_key, no_key, user_key_path
from kvd.transport.finding import Finding, Outcome
from kvd.transport.zmq.curve import Curve, fingerprint
from kvd.transport.zmq.probe import try_handshake

FIRST_LOOK_S: Final = 0.5
"""How long a scheduler may take to answer before its handshake is tried. Within 3 s the reason is known."""

LOOK_EVERY_S: Final = 2.0
KEY_POLL_S: Final = 0.1
LOOK_POLL_S: Final = 0.01

FIRST_NOTICE_S: Final = 3.0
"""When a wait is first reported. The next reports come after 9, 21, 45 … s."""

T = TypeVar("T")


class Notices:
    """The times at which one wait is reported.

    Args:
        first_s: seconds until the first report.
        clock: in seconds.
    """

    def __init__(self, first_s: float = FIRST_NOTICE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_s = first_s
        self._clock = clock
        self._begun = clock()
        self._next_s = first_s

    def left_s(self) -> float:
        """Seconds until the next report is due."""
        return max(0.0, self._begun + self._next_s - self._clock())

    def is_due(self, finding: Finding | None = None) -> bool:
        """Return whether to report the wait now. The first report of a refused connection is due at once."""
        is_refused = finding is not None and finding.outcome is Outcome.REFUSED and self._next_s == self._first_s
        if not is_refused and self.left_s() > 0:
            return False
        self._next_s = 2 * self._next_s + self._first_s
        return True


class HandshakeWatch:
    """Handshakes with the scheduler until it answers.

    Args:
        address: of the scheduler.
        curve: the keys of this node.
        session: with the scheduler: `heard` ends the watch.
        on_problem: takes the error, if one shows that waiting is in vain.
        on_finding: called after each handshake that found why there is no answer.

    Attributes:
        finding: what the last handshake showed; None before the first.
    """

    def __init__(
        self,
        address: str,
        curve: Curve | None,
        session: SchedulerSession,
        on_problem: Callable[[ConnectError], None],
        on_finding: Callable[[], None] = lambda: None,
    ) -> None:
        self.finding: Finding | None = None
        self._address = address
        self._curve = curve
        self._session = session
        self._on_problem = on_problem
        self._on_finding = on_finding

    async def run(self) -> None:
        """Return when the scheduler was heard, or a problem was found."""
        await asyncio.sleep(FIRST_LOOK_S)
        while not self._session.heard:
            self.finding = await finding_of(self._address, self._curve)
            problem = problem_of(self.finding, self._address, self._curve)
            if problem and not self._session.heard:
                self._on_problem(ConnectError(problem, address=self._address))
                return
            self._on_finding()
            await asyncio.sleep(LOOK_EVERY_S)


async def finding_of(address: str, curve: Curve | None) -> Finding:
    """Return what `try_handshake` finds, without blocking the loop."""
    return await in_daemon_thread(lambda: try_handshake(address, curve))


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def end(ended: Future[T]) -> None:
        if done.done():  # nobody waits any more
            return
        error = ended.exception()
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(ended.result())

    def pass_on(ended: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, ended)

    _begun_in_daemon_thread(work).add_done_callback(pass_on)
    return await done


def _begun_in_daemon_thread(work: Callable[[], T]) -> Future[T]:
    begun: Future[T] = Future()

    def run() -> None:
        try:
            begun.set_result(work())
        except Exception as caught:  # noqa: BLE001  raised where it is awaited
            begun.set_exception(caught)

    threading.Thread(target=run, name="kvd-search", daemon=True).start()
    return begun


class KeyWait:
    """Waits for the key of this process, which the first scheduler of the user makes, or a person imports.

    Args:
        config: the settings.
        role: of this process.
        tell: called at the times of `Notices`, while the key is missing.
        pause: waits for up to this number of seconds; by default until `stop`.

    Attributes:
        finding: what the last handshake with the scheduler showed; None before the first.
    """

    def __init__(
        self,
        config: Config,
        role: str,
        tell: Callable[[], None] = lambda: None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self.finding: Finding | None = None
        self._config = config
        self._role = role
        self._tell = tell
        self._stopped = threading.Event()
        self._pause = pause or self._stopped.wait

    def run(self, until: float) -> None:
        """Return when the key is there, or the wait was stopped. Blocks.

        Args:
            until: when to give up, as of `time.monotonic`.

        Raises:
            ConfigError: the user has no key.
            ConnectError: the scheduler shows that no key will help.
        """
        notices = Notices()
        look_at = min(time.monotonic() + FIRST_LOOK_S, until)
        while (path := missing_key(self._config, self._role)) is not None and not self._stopped.is_set():
            if time.monotonic() >= look_at:
                self.finding = self._look()
                if self.finding is None:
                    return
                problem = problem_without_key(self.finding, self._config.scheduler)
                if problem:
                    raise ConnectError(problem, address=self._config.scheduler)
                look_at = time.monotonic() + LOOK_EVERY_S
            if time.monotonic() >= until:
                raise no_key(path)
            if notices.is_due(self.finding):
                self._tell()
            self._pause(KEY_POLL_S)

    def _look(self) -> Finding | None:
        """Try a handshake in another thread: a signal cannot end it, but it can end the pauses. None: the wait
        was stopped."""
        look = _begun_in_daemon_thread(lambda: try_handshake(self._config.scheduler, None))
        while not look.done():
            if self._stopped.is_set():
                return None
            self._pause(LOOK_POLL_S)
        return look.result()

    def describe(self) -> str:
        """Return what is missing, and what to do."""
        where, finding = self._config.scheduler, self.finding
        has_keys = finding is not None and finding.outcome is Outcome.WITH_KEYS
        scheduler = f"a scheduler answers at {where}" if has_keys else no_answer(finding, where)
        return f"{scheduler}, and {no_key(user_key_path())}"

    def stop(self) -> None:
        """End the wait, from any thread."""
        self._stopped.set()


def no_answer(finding: Finding | None, address: str) -> str:
    """That no scheduler answers, and why, as far as that is known."""
    if finding is not None and finding.outcome is Outcome.SUCCEEDED:
        return f"the scheduler at {address} accepts connections, and does not answer"
    if finding is not None and finding.outcome is Outcome.UNKNOWN_NAME:
        return f"the host {parse_address(address).host!r} of {address} is not known here ({finding.detail})"
    reason = f" ({finding.detail})" if finding is not None and finding.detail else ""
    return f"no scheduler answers at {address}{reason}"


def remedy(finding: Finding | None, address: str, size: str = "") -> str:
    """What to do if no scheduler answers.

    Args:
        finding: what a handshake showed.
        address: of the scheduler.
        size: flags of `kvd scheduler` with the size of the cluster.
    """
    if finding is not None and finding.outcome is Outcome.SUCCEEDED:
        return "look at its log, and whether its process is stopped"
    if finding is not None and finding.outcome is Outcome.UNKNOWN_NAME:
        return "correct the scheduler's address (--scheduler, KVD_SCHEDULER), or give the host's number"
    return f"start one there (kvd scheduler --scheduler {address}{size}), or set KVD_SCHEDULER to where it is"


def problem_without_key(finding: Finding, address: str) -> str:
    """What is wrong for a process that waits for its key to be made; "" if waiting may help."""
    if finding.outcome is Outcome.SUCCEEDED:
        return (
            f"the scheduler at {address} runs without keys (--insecure), and this process has none either: give "
            "--insecure (KVD_INSECURE=1) here, too, or start the scheduler again with keys"
        )
    return problem_of(finding, address, None) if finding.outcome is Outcome.NOT_ZMQ else ""


_PROBLEMS: Final = {
    Outcome.WITH_KEYS: "the scheduler at {address} expects a key, and this process runs without (--insecure, "
    "KVD_INSECURE=1): leave that out, and give the scheduler's key with --keyfile (KVD_KEYFILE) if it is not this "
    "user's own",
    Outcome.WITHOUT_KEYS: "the scheduler at {address} runs without keys (--insecure), and this process has {own}: "
    "start the scheduler again with keys, or give --insecure (KVD_INSECURE=1) here, too",
    Outcome.OTHER_KEY: "the scheduler at {address} has another key than this process, which has {own}: name the "
    "scheduler's key with --keyfile (KVD_KEYFILE), or import it: kvd key export on its host, kvd key import here",
    Outcome.NOT_ADMITTED: "the scheduler at {address} does not let this process in, which has {own}: add its public "
    "key to the scheduler's list of allowed keys, and send the scheduler SIGHUP",
    Outcome.NOT_ZMQ: "what listens at {address} is no kvd scheduler, but {detail}: correct the address (--scheduler, "
    "KVD_SCHEDULER)",
}
"""By what a handshake showed: what is wrong, and what to do. Waiting may help in the other cases."""


def problem_of(finding: Finding, address: str, curve: Curve | None) -> str:
    """What is wrong, and what to do about it; "" if waiting may help."""
    own = "no key" if curve is None else f"{curve.origin} (public key {fingerprint(curve.own.public)})"
    return _PROBLEMS.get(finding.outcome, "").format(address=address, own=own, detail=finding.detail)

"""What a node does while the scheduler does not answer: it looks whether their keys are the reason.

ZeroMQ tries a handshake that failed again for ever. With wrong keys that would end in a timeout, which says nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvd.errors import ConnectError
from kvd.transport.curve import Curve, fingerprint
from kvd.transport.probe import Outcome, try_handshake

FIRST_LOOK_S: Final = 0.5
"""How long a scheduler may take to answer before its handshake is tried. Within 3 s the reason is known."""

LOOK_EVERY_S: Final = 2.0


async def watch_handshake(
    address: str, curve: Curve | None, heard: Callable[[], bool], on_problem: Callable[[ConnectError], None]
) -> None:
    """Try handshakes with the scheduler until it is heard, or one shows why it cannot be.

    Args:
        address: of the scheduler.
        curve: the keys of this node.
        heard: whether anything came from the scheduler.
        on_problem: takes the error.
    """
    await asyncio.sleep(FIRST_LOOK_S)
    while not heard():
        outcome = await _in_a_thread(address, curve)
        problem = problem_of(outcome, address, curve)
        if problem and not heard():
            on_problem(ConnectError(problem, address=address))
            return
        await asyncio.sleep(LOOK_EVERY_S)


async def _in_a_thread(address: str, curve: Curve | None) -> Outcome:
    """`try_handshake` in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Outcome] = loop.create_future()

    def tell(outcome: Outcome) -> None:
        if not done.done():
            done.set_result(outcome)

    def run() -> None:
        outcome = try_handshake(address, curve)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, outcome)

    threading.Thread(target=run, name="kvd-handshake", daemon=True).start()
    return await done


def problem_of(outcome: Outcome, address: str, curve: Curve | None) -> str:
    """What is wrong, and what to do about it; "" if nothing is, as far as keys are concerned."""
    own = "no key" if curve is None else f"{curve.origin} (public key {fingerprint(curve.own.public)})"
    if outcome is Outcome.WITH_KEYS:
        return (
            f"the scheduler at {address} expects a key, and this process runs without (--insecure, KVD_INSECURE=1): "
            "leave that out, and give the scheduler's key with --keyfile (KVD_KEYFILE) if it is not this user's own"
        )
    if outcome is Outcome.WITHOUT_KEYS:
        return (
            f"the scheduler at {address} runs without keys (--insecure), and this process has {own}: start the "
            "scheduler again with keys, or give --insecure (KVD_INSECURE=1) here, too"
        )
    if outcome is Outcome.OTHER_KEY:
        return (
            f"the scheduler at {address} has another key than this process, which has {own}: name the scheduler's key "
            "with --keyfile (KVD_KEYFILE), or import it: kvd key export on its host, kvd key import here"
        )
    if outcome is Outcome.NOT_ADMITTED:
        return (
            f"the scheduler at {address} does not let this process in, which has {own}: add its public key to the "
            "scheduler's list of allowed keys, and send the scheduler SIGHUP"
        )
    if outcome is Outcome.NOT_ZMQ:
        return f"what listens at {address} is no kvd scheduler: correct the address (--scheduler, KVD_SCHEDULER)"
    return ""

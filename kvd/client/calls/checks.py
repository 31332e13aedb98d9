"""What a program may say in a call besides keys and values.

The rules are the same for every type of store: the store in this process also refuses, in the call, what a cluster
would refuse or no message could say.
"""

from __future__ import annotations

import hashlib
import numbers
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvd.client.calls.keys import key_name
from kvd.errors import ConfigError, KvdError, NotAllowed, StoreClosed
from kvd.optimizer import Optimizer, changes_to_wire
from kvd.optimizer.fields import MAX_COUNT, multipliers, number, shown
from kvd.optimizer.schedule import Schedule
from kvd.protocol.codec import encode
from kvd.protocol.messages import BIGGEST, NO_VIEW, SetOptimizer, UpdateOptimizer
from kvd.protocol.specs import MAX_KEY_CHARS

MAX_COMMAND_BYTES = 64 << 20


def whole(what: str, value: object, low: int) -> int:
    """The value as a plain int, which a message can carry. Raises NotAllowed unless it is whole and at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= BIGGEST:
        raise NotAllowed(f"{what} is a whole number from {low} to {BIGGEST}, not {shown(value)}")
    return int(value)


def priority_and_samples(priority: object, samples: object = 1) -> tuple[int, int]:
    """Both as plain ints, which a message can carry. Raises NotAllowed."""
    if (
        type(priority) is int
        and type(samples) is int
        and -BIGGEST <= priority <= BIGGEST
        and 0 <= samples <= BIGGEST  # by far the most common
    ):
        return priority, samples
    return whole("priority", priority, -BIGGEST), whole("samples", samples, 0)


def wants_copy(copy: object, out: object) -> bool:
    """Whether the program wants values in arrays that it may write to. Raises NotAllowed if it also says where to."""
    if not isinstance(copy, bool | np.bool_):
        raise NotAllowed(f"copy is True or False, not {shown(copy)}")
    if not copy and out is not None:
        raise NotAllowed("with copy=False the call gives new arrays, read-only, and fills none: leave out away")
    return bool(copy)


def clock_number(clock: object) -> int:
    """The clock to rewind to. Raises NotAllowed."""
    return whole("a clock counts pushes: it", clock, 0)


def seconds(timeout: object) -> float:
    """A timeout that the program gave. Raises NotAllowed unless it is a number of seconds from 0 on."""
    if isinstance(timeout, int | float | np.integer | np.floating) and not isinstance(timeout, bool) and timeout >= 0:
        try:
            return float(timeout)
        except OverflowError:  # an int that no clock will ever reach
            return float("inf")
    raise NotAllowed(f"a timeout is a number of seconds, 0 or more, not {shown(timeout)}")


def patience(timeout: float | None) -> float | None:
    """The same, limited to what the threads of Python can wait: some centuries."""
    return None if timeout is None else min(seconds(timeout), threading.TIMEOUT_MAX)


def barrier_name(kind: str, name: object, what: str = "the name of a barrier") -> str:
    """The name under which the scheduler knows a barrier. A name that is too long is replaced by its digest: two names
    that are cut off could be the same. Raises NotAllowed unless the name is text in UTF-8, or a whole number."""
    if isinstance(name, bool) or not isinstance(name, str | int | np.integer):
        raise NotAllowed(f"{what} is a str or an int, not {type(name).__name__}")
    full = f"{kind}:{name if isinstance(name, str) else whole(what, name, -BIGGEST)}"
    encoded = utf8(what, full)
    return full if len(full) <= MAX_KEY_CHARS else f"{kind}:sha256:{hashlib.sha256(encoded).hexdigest()}"


def utf8(what: str, text: str) -> bytes:
    """The text in UTF-8. Raises NotAllowed if it has half a surrogate pair, which UTF-8 cannot write."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise NotAllowed(f"{what} is a text that UTF-8 can write, which has no {text[error.start]!r}") from None


def command_head(head: object) -> str:
    """The name of a controller. Raises NotAllowed."""
    return key_name(head, "the head of a command")


def command_body(body: object) -> bytes:
    """The bytes for a controller. Raises NotAllowed."""
    if not isinstance(body, str | bytes | bytearray | memoryview):
        raise NotAllowed(f"the body of a command is bytes or a str, not {type(body).__name__}")
    data = utf8("the body of a command", body) if isinstance(body, str) else bytes(body)
    if len(data) > MAX_COMMAND_BYTES:
        raise NotAllowed(f"the body of a command has at most {MAX_COMMAND_BYTES >> 20} MiB, not {len(data)} bytes")
    return data


def node_number(node_id: object) -> int:
    """A group mask or the id of one node, as in ps-lite. Raises NotAllowed."""
    if isinstance(node_id, bool) or not isinstance(node_id, int | np.integer) or node_id < 1:
        raise NotAllowed(f"a node id is a group mask from 1 to 7, or 8 and more for one node, not {shown(node_id)}")
    return int(node_id)


def file_path(path: object) -> Path:
    """The path of a file. Raises NotAllowed if the system could have no file of that name."""
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
        usable = bool(text) and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeError):
        usable = False
    if not usable:
        raise NotAllowed(f"the path of a file is a str or a Path with a file's name, not {shown(path)}")
    return Path(text)


def known_optimizer(optimizer: object) -> Optimizer | None:
    """The optimizer to set, or None. Raises ConfigError for anything else."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        kind = type(optimizer)
        if kind.__module__.startswith("torch.optim"):
            text = (
                f"torch.optim.{kind.__name__} cannot run on the servers: pass one of kvd.optimizer, such as "
                "AdamW(0.001), or call its step() in the workers and set no optimizer here"
            )
        else:
            text = f"{shown(optimizer)} is not an optimizer: pass one of kvd.optimizer, such as SGD(0.1), or None"
        raise ConfigError(text, setting="optimizer")
    return optimizer


def hyperparameters(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes with plain values, which a message can carry: other kinds of numbers become those of Python.

    Raises:
        ConfigError: no optimizer can have such a value.
        NotAllowed: no message can carry them.
    """
    plain = {name: _plain_value(name, value) for name, value in changes.items()}
    check_sendable("the change of an optimizer", UpdateOptimizer(0, changes_to_wire(plain)))
    return plain


def _plain_value(name: str, value: object) -> object:
    if value is None or isinstance(value, bool | str | Schedule):
        return value
    if isinstance(value, numbers.Integral) and -MAX_COUNT <= int(value) <= MAX_COUNT:
        return int(value)
    if isinstance(value, Mapping):
        return multipliers(name, value)
    return number(name, value)


def check_sendable(what: str, message: SetOptimizer | UpdateOptimizer) -> None:
    """Raises NotAllowed unless the message can be encoded: later, no call is there to raise the error."""
    try:
        encode(message, 0, NO_VIEW)
    except (KvdError, ValueError, TypeError, OverflowError, AttributeError) as error:
        raise NotAllowed(f"{what} cannot be sent: {error}; use shorter texts, and values that are plain") from None


def forked_error() -> StoreClosed:
    """The error of a call in a child of the process that opened the store."""
    return StoreClosed("this store belongs to the parent process: create one after the fork, in the child")


def closed_error() -> StoreClosed:
    """The error of a call after close."""
    return StoreClosed("this store is closed: create another")

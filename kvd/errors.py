"""Every error that kvd raises on purpose.

::

    KvdError
    ├── ConfigError          a setting is wrong, or disagrees with the cluster's
    │   └── InputMismatch    the input of a group does not fit (also a ValueError)
    ├── GradientAnomaly      a gradient is not finite (also a FloatingPointError)
    ├── ConnectError         no node answers at an address, or an address is taken
    ├── RequestTimeout       a deadline passed (also a TimeoutError)
    │   └── Deadlock         every worker waits for another one, and none can go on
    ├── ProtocolError        bytes that are not a valid message
    ├── NodeLost             a node that the call waits for is dead
    ├── BarrierBroken        some workers can no longer reach a barrier
    ├── NotResumed           a restarted worker has not said where it continues, or has lost what it trained
    │   └── StateLost        no living worker has the state that a program with its own optimizer needs
    ├── JobEnded             the run that this worker belongs to has ended
    ├── JobBusy              another program runs under the job's name
    ├── StoreClosed          the store was closed, or belongs to another process
    ├── SnapshotError        a snapshot cannot be written, or what is there is not a whole one
    └── RemoteError          a server or the scheduler refused
        ├── KeyNotFound      (also a KeyError)
        ├── KeyExists
        ├── ShapeMismatch    (also a ValueError)
        ├── DtypeMismatch    (also a TypeError)
        ├── MergeMismatch    (also a ValueError)
        └── NotAllowed
            ├── NotCopyable          a store cannot be copied or pickled (also a TypeError)
            ├── NotInitialized       a façade of another framework is used before its `init` (also a ValueError)
            └── VersionUnavailable   the servers do not have a version, or not yet

The attributes carry what a program needs; the message says what a person can do next.
"""

from __future__ import annotations

from typing import Any, Literal

Outcome = Literal["not_sent", "unknown"]
"""Whether a call that timed out left this process: surely not, or perhaps."""


class KvdError(Exception):
    """The root: ``except kvd.KvdError`` catches everything that kvd raises on purpose.

    It can be pickled with its attributes, so a pool of processes can raise it where the result is awaited.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args), vars(self)


def _unpickled(kind: type[KvdError], arguments: tuple[Any, ...]) -> KvdError:
    """An error without its attributes, which follow."""
    error = kind.__new__(kind)
    error.args = arguments
    return error


class ConfigError(KvdError):
    """A setting is wrong, or disagrees with the cluster's.

    Attributes:
        setting: the name of the setting, empty if several are involved.
    """

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


class InputMismatch(ConfigError, ValueError):
    """Batches, descriptions or parameter names do not fit a group. Also a ValueError, as in MXNet."""


class GradientAnomaly(KvdError, FloatingPointError):
    """A gradient is not finite.

    Attributes:
        parameter: its name.
        device: where it was computed, such as ``"cuda:0"``.
    """

    def __init__(self, parameter: str, device: str) -> None:
        super().__init__(f"the gradient of {parameter} on {device} has a NaN or an infinity")
        self.parameter = parameter
        self.device = device


class ConnectError(KvdError):
    """No node answers at an address, or the address to listen on is taken.

    Attributes:
        address: the address as it was given.
    """

    def __init__(self, message: str, *, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class RequestTimeout(KvdError, TimeoutError):
    """A call did not finish before its deadline. Only the waiting ends: a push under way continues.

    Attributes:
        outcome: ``"not_sent"`` if nothing left this process, ``"unknown"`` if any part may have arrived.
        waiting_for: the nodes that it waited for: workers whose turn it is, such as ``"worker 1"``, or servers that did
            not answer, such as ``"server 1"``.
    """

    def __init__(self, message: str, *, outcome: Outcome = "unknown", waiting_for: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome
        self.waiting_for = waiting_for


class Deadlock(RequestTimeout):
    """Every worker waits for another one, and none can go on: they push other keys, or meet at other barriers.

    All workers raise it at about the same time. Only the waiting ends, as with any RequestTimeout.

    Attributes:
        waits: for each worker, who it is and what it waits for, in words; for 32 workers at most.
    """

    def __init__(
        self,
        message: str,
        *,
        outcome: Outcome = "unknown",
        waiting_for: tuple[str, ...] = (),
        waits: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, outcome=outcome, waiting_for=waiting_for)
        self.waits = waits


class ProtocolError(KvdError):
    """Bytes that are not a message of this protocol version, or a message that breaks its rules."""


class NodeLost(KvdError):
    """A node that the call waits for was declared dead.

    With ``replicas=2`` another server takes the place of one that died, and calls go on there. They raise it all the
    same if that server was the last one that had the values, or if they are about the process itself, as a command is.

    Attributes:
        node: its role and rank, such as ``"worker 1"``.
        last_seen_s: seconds between its last sign of life and the declaration.
        reason: why it was declared dead, in words.
    """

    def __init__(self, message: str, *, node: str, last_seen_s: float = 0.0, reason: str = "") -> None:
        super().__init__(message)
        self.node = node
        self.last_seen_s = last_seen_s
        self.reason = reason


class BarrierBroken(KvdError):
    """A barrier was given up because some of its workers can no longer reach it.

    Attributes:
        missing: those workers, such as ``("worker 1",)``.
    """

    def __init__(self, message: str, *, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class NotResumed(KvdError):
    """A worker cannot continue where its predecessor, or the other workers, have got to.

    It pushes before it has said where it continues, and would train its first steps twice; or steps were made without
    it, and no optimizer is set on the servers, which therefore do not have what these steps changed.

    Attributes:
        key: the key of the push; empty if it is about a loop over `steps`.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class StateLost(NotResumed):
    """No living worker has the weights and the optimizer's state that this one needs.

    Each worker keeps them itself where no optimizer is set on the servers, and a restarted one gets them from another.
    That has failed because all others are dead or need them, too, or have finished and left.

    Attributes:
        steps: of the loops of the program, after which the state was needed.
    """

    def __init__(self, message: str, *, steps: int = 0) -> None:
        super().__init__(message)
        self.steps = steps


class JobEnded(KvdError):
    """The run that this process belongs to has ended: its workers left, or ``kvd jobs end`` ended it.

    Attributes:
        job: the name of the job.
    """

    def __init__(self, message: str, *, job: str) -> None:
        super().__init__(message)
        self.job = job


class JobBusy(KvdError):
    """Another program is running under the name of the job, and this process does not belong to it.

    Attributes:
        job: the name of the job.
    """

    def __init__(self, message: str, *, job: str) -> None:
        super().__init__(message)
        self.job = job


class StoreClosed(KvdError):
    """The store was closed, or a forked child uses the store of its parent."""


class SnapshotError(KvdError):
    """A snapshot cannot be written; or what is to be restored is no snapshot, damaged, or of a newer kvd.

    Attributes:
        path: the file or folder in question.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class RemoteError(KvdError):
    """A server or the scheduler refused a request.

    Attributes:
        node: who refused, such as ``"server 0"``; empty if this side noticed it.
        key: the key in question as the program wrote it, a str or an int; empty if there is none.
    """

    def __init__(self, message: str, *, node: str = "", key: str | int = "") -> None:
        super().__init__(message)
        self.node = node
        self.key = key

    def name_key(self, key: str | int) -> None:
        """Name the key in the attribute and in the text, unless the error names one already."""
        if self.key == "":
            self.key = key
            self.args = (f"key {key!r}: {self.args[0]}", *self.args[1:])


class KeyNotFound(RemoteError, KeyError):
    """The key was never initialised, or its server lost it."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class KeyExists(RemoteError):
    """The key exists already."""


class ShapeMismatch(RemoteError, ValueError):
    """An array has another shape than its key."""


class DtypeMismatch(RemoteError, TypeError):
    """An array has another dtype than its key."""


class MergeMismatch(RemoteError, ValueError):
    """A key is made again with another merge than it has."""


class NotAllowed(RemoteError):
    """The request makes no sense in the state that the cluster, the key or the store is in."""


class NotCopyable(NotAllowed, TypeError):
    """A store, or what belongs to one, cannot be copied, pickled or saved: it belongs to its process.

    Also a TypeError, as Python raises for threads and sockets.
    """


class NotInitialized(NotAllowed, ValueError):
    """A call of `kvd.compat.horovod.torch` or its like comes before ``init()``, or after ``shutdown()``.

    Also a ValueError, as in Horovod.
    """


class VersionUnavailable(NotAllowed):
    """The servers do not keep this version any more, or it is not complete yet.

    Attributes:
        version: that was asked for.
        oldest: the oldest version that they have of all the keys.
        newest: the newest one that is complete.
    """

    def __init__(
        self, message: str, *, version: int = 0, oldest: int = 0, newest: int = 0, node: str = "", key: str = ""
    ) -> None:
        super().__init__(message, node=node, key=key)
        self.version = version
        self.oldest = oldest
        self.newest = newest

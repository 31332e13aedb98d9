"""How a program ends, and the stores that it leaves open.

The stores of a cluster are kept here until they are closed. So a store that a program lets go of, as a script does that
creates it in a function, leaves the cluster in good order when the process ends. A store without a cluster has nothing
to leave, but its unobserved errors are raised then as well.

The exit status decides whether the program failed: if it is not 0, the stores leave at once, and their workers count as
dead. An exit handler is not given the status, so it is noted when the interpreter reads it, see `_ExitCode`. A child of
`multiprocessing` ends by ``os._exit``, without exit handlers: its stores leave in a finalizer of `multiprocessing`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import os
import sys
import threading
from contextlib import suppress
from multiprocessing import parent_process, util
from types import ModuleType
from typing import Any, Protocol

from kvd.client.calls.handle import Handle
from kvd.client.calls.held_signals import uninterrupted
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.errors import KvdError

BEFORE_CHILDREN_ARE_JOINED = 100  # a priority of `multiprocessing.util`


class Leaver(Protocol):
    """An open store, see `kvd.client.facades.life`."""

    def claim_end(self) -> bool: ...
    def begin_close(self, *, barrier: bool = True) -> Handle: ...
    def end_close(self, leaving: Handle) -> None: ...
    def abandon(self, *, failed: bool) -> None: ...


# ── what is left open ──

_stores: set[Leaver] = set()
_errors: set[UnobservedErrors] = set()
os.register_at_fork(after_in_child=_stores.clear)  # they belong to the parent
os.register_at_fork(after_in_child=_errors.clear)


def leave_at_exit(store: Leaver) -> None:
    """Has the store leave its cluster when the process ends, unless `forget` comes first."""
    _watch_for_the_end()
    _stores.add(store)


def forget(store: Leaver) -> None:
    _stores.discard(store)


def raise_at_exit(errors: UnobservedErrors) -> None:
    """Raises the errors that are still unobserved when the process ends well."""
    _watch_for_the_end()
    _errors.add(errors)


@uninterrupted
def _leave(*, failed: bool, barrier: bool) -> None:
    """Leave with all stores: at once if the program failed, otherwise as by close().

    All stores begin before the first is waited for: they may be workers that wait for each other. If a signal handler
    raises meanwhile, the stores that are left leave at once, as the one that was being waited for does.
    """
    begun: list[tuple[Leaver, Handle | None]] = []
    for store in list(_stores):
        if store.claim_end():
            with suppress(KvdError):
                begun.append((store, None if failed else store.begin_close(barrier=barrier)))
    raised: list[BaseException] = []
    is_interrupted = False
    for store, leaving in begun:
        try:
            if leaving is None or is_interrupted:
                store.abandon(failed=True)
            else:
                store.end_close(leaving)
        except KvdError as error:
            raised.append(error)
        except BaseException as error:  # noqa: BLE001  raised below
            is_interrupted = True
            raised.insert(0, error)
    for errors in [] if failed else list(_errors):
        try:
            errors.raise_for(None)
        except KvdError as error:
            raised.append(error)
    if raised:
        raise raised[0]


# ── with what the program ends ──


def ends_well(kind: type[BaseException] | None, error: BaseException | None) -> bool:
    """Whether a block, or a program, that this error leaves ends well: there is none, or a SystemExit with status 0.

    Closing a generator raises GeneratorExit in it, which is not a failure either.

    Args:
        kind: the type of the error, None without one.
        error: the error itself.
    """
    if isinstance(error, SystemExit):
        return _is_success(error.code)
    return kind is None or issubclass(kind, GeneratorExit)


def _is_success(code: object) -> bool:
    """Whether ``sys.exit(code)`` ends the process with status 0. The system keeps 8 bits of it; text means 1."""
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


class _ExitCode:
    """`SystemExit.code`, or that of a subclass which has its own. It notes the code that ends the interpreter.

    CPython reads it after the last frame of the main thread has ended, and runs the exit handlers next. A program that
    catches the error and reads it has a frame.

    Args:
        attribute: the attribute that this one replaces: a descriptor, or a value that all instances share.
        final: takes the code.
    """

    def __init__(self, attribute: Any, final: list[object]) -> None:
        self.final = final
        self._attribute = attribute
        self._reads = hasattr(type(attribute), "__get__")
        self._writes = hasattr(type(attribute), "__set__")

    def __get__(self, error: SystemExit | None, owner: type | None = None) -> Any:
        if error is None:
            return self._attribute.__get__(None, owner) if self._reads else self._attribute
        if not self._writes and "code" in vars(error):
            code = vars(error)["code"]
        else:
            code = self._attribute.__get__(error, owner) if self._reads else self._attribute
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            self.final[:] = [code]
        return code

    def __set__(self, error: SystemExit, code: object) -> None:
        if self._writes:
            self._attribute.__set__(error, code)
        else:
            vars(error)["code"] = code

    def __delete__(self, error: SystemExit) -> None:
        if self._writes:
            self._attribute.__delete__(error)
        else:
            del vars(error)["code"]

    def has_failed(self) -> bool:
        """Whether the program failed. Ask in an exit handler."""
        if self.final:
            return not _is_success(self.final[0])
        return _was_uncaught(getattr(sys, "last_traceback", None))


def _was_uncaught(traceback: Any) -> bool:
    """Whether an error with this traceback, which was printed, ended the program.

    An interactive interpreter prints errors and continues. So do libraries, but their errors begin in a frame that
    another one called.
    """
    return traceback is not None and traceback.tb_frame.f_back is None and not hasattr(sys, "ps1")


def _watched_exit_code() -> _ExitCode:
    """The present `SystemExit.code`, put there if it is not there yet.

    The attributes of a builtin type can only be replaced in the dict behind its ``__dict__``.
    """
    attribute = vars(SystemExit)["code"]
    if not isinstance(attribute, _ExitCode):
        attribute = _ExitCode(attribute, [])
        gc.get_referents(vars(SystemExit))[0].update(code=attribute, __init_subclass__=_watch_new_subclass)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
        for subclass in SystemExit.__subclasses__():
            _watch_subclass(subclass, attribute.final)
        if sys.version_info < (3, 12):
            _raise_exit_objects()
    return attribute


@classmethod  # type: ignore[misc]
def _watch_new_subclass(cls: type[SystemExit], **options: Any) -> None:
    """`SystemExit.__init_subclass__`."""
    super(SystemExit, cls).__init_subclass__(**options)
    _watch_subclass(cls, _watched_exit_code().final)


def _watch_subclass(subclass: type[SystemExit], final: list[object]) -> None:
    """Note the code that ends the interpreter for a subclass, and for its own subclasses, if they have their own."""
    code = vars(subclass).get("code", final)
    if code is not final and not isinstance(code, _ExitCode):
        setattr(subclass, "code", _ExitCode(code, final))  # noqa: B010
    for each in subclass.__subclasses__():
        _watch_subclass(each, final)


def _raise_exit_objects() -> None:
    """Until Python 3.11 the error of `sys.exit` has a code to read only once it was caught. Let it be caught."""
    exit_ = sys.exit

    @functools.wraps(exit_)
    def caught(*status: Any) -> Any:
        try:
            exit_(*status)
        except SystemExit:
            raise

    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            namespace = vars(module)
            namespace.update({name: caught for name, value in list(namespace.items()) if value is exit_})


# ── when the process ends ──

_finalizers: list[util.Finalize] = []
os.register_at_fork(after_in_child=_finalizers.clear)


def _watch_for_the_end() -> None:
    """Prepare this process for an end with open stores."""
    _watched_exit_code()
    if parent_process() is not None and not _finalizers:
        _finalizers.append(util.Finalize(None, _leave_child, exitpriority=BEFORE_CHILDREN_ARE_JOINED))


def _leave_child() -> None:
    """Leave at the end of a child of `multiprocessing`. It meets nobody: its parent may be waiting for it."""
    kind, error, _ = sys.exc_info()
    _leave(failed=not ends_well(kind, error), barrier=False)


def _leave_interpreter() -> None:
    if _stores or _errors:
        _leave(failed=_watched_exit_code().has_failed(), barrier=True)


atexit.register(_leave_interpreter)  # it is called before the handler of `multiprocessing.util`, which joins children

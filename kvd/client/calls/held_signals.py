"""Signal handlers of the program, held back while kvd works on the main thread.

CPython runs a Python signal handler on the main thread, between any two bytecodes. An exception from one would leave
the worker's machine, its queues or its locks half changed. So every public call is a *section*: its decorator replaces
all Python handlers by one that only notes the signal, and restores them at the end. The noted signals are then passed
to their handlers, and what these raise leaves the call.

A signal wakes a call that waits (`HeldSignals.begin_wait`, `HeldSignals.pause`). Its handler runs at that point, where
nothing is half done, and the wait continues if it returns. What a handler raises there passes
through kvd as `HandlerRaised`, which no `except Exception` or `except TimeoutError` catches; the end of the section
raises the exception itself.

Handlers count from the moment in which they are installed, whoever installs them: `signal.signal` is watched, so that a
section need not ask for the handlers of all signals. What a library in C has installed over a Python handler, such as
`faulthandler.register` with ``chain=True``, stays. Other threads never run handlers: on them a section does nothing.

One thing is beyond reach: Python discards what is raised in finalizers and in callbacks of weak references.
"""

from __future__ import annotations

import _signal as signal_module  # `signal` converts to enums around its functions, which takes longer than the calls
import atexit
import ctypes
import functools
import inspect
import os
import threading
from collections.abc import Callable, Generator
from queue import Empty, SimpleQueue
from signal import NSIG, raise_signal
from types import FrameType, FunctionType
from typing import Any, ParamSpec, Protocol, TypeVar

LONGEST_PAUSE_S = 3600.0  # callers may ask for more than a lock accepts

_NUMBERS = range(1, NSIG)
_getsignal, _signal = signal_module.getsignal, signal_module.signal

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Class = TypeVar("Class", bound=type)


class HandlerRaised(BaseException):
    """An exception of a signal handler, on its way through kvd.

    Attributes:
        error: the exception.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Interrupt(Protocol):
    """A wait that a signal may end.

    Attributes:
        came: whether a signal has arrived.
    """

    @property
    def came(self) -> bool: ...
    def end_wait(self) -> None: ...


class _Action(ctypes.Structure):
    """What the system does at a signal: `struct sigaction`."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (1024 // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_sigaction = ctypes.PyDLL(None).sigaction
_sigaction.argtypes = (ctypes.c_int, ctypes.POINTER(_Action), ctypes.POINTER(_Action))


class _Never:
    """A wait on a thread that runs no signal handlers."""

    came = False

    def end_wait(self) -> None:
        pass


_NEVER = _Never()


class HeldSignals:
    """The Python signal handlers of this process. There is one, as the handlers belong to the process: `signals`.

    Attributes:
        main: the thread on which handlers run; None once the interpreter exits.
        is_held: whether a section is open: noted signals wait for its end, or for its next wait.
    """

    def __init__(self) -> None:
        self.main: int | None = threading.main_thread().ident
        self.is_held = False
        self._noted: dict[int, FrameType | None] = {}  # by number, in the order of arrival
        self._caught: list[int] = []  # the signals with Python handlers when the latest section began
        self._change = object()  # another one whenever a handler was installed
        self._installing = 0  # calls of `signal.signal` that are under way
        self._seen: object = None  # the latest change when `_caught` was found
        self._handlers: dict[int, Any] = {}  # by number: what the program has installed
        self._actions: dict[int, _Action] = {}  # what libraries in C have installed over them
        self._action = _Action()
        self._plain: tuple[Any, Any] | None = None  # handler and flags of what Python installs for its handlers
        self._note = self._noted_or_handled  # one object, which is recognised by its identity
        self._wake: Callable[[], object] | None = None

    # ── sections, on the main thread ──

    def hold(self) -> None:
        """Begins a section. If a handler raises before all are replaced, the rest is replaced first."""
        try:
            self.is_held = True
            change = self._change
            if change is not self._seen or self._installing:
                self._caught = [number for number in _NUMBERS if callable(_getsignal(number))]
                self._seen = change
            for number in self._caught:
                handler = _getsignal(number)
                if handler is not self._note:
                    self._handlers[number] = handler
                    _sigaction(number, None, self._action)
                    if (self._action.handler, self._action.flags) != self._plain:
                        self._actions[number] = _Action.from_buffer_copy(self._action)
                    _signal(number, self._note)
            if self._actions:
                self._keep_actions()
        except BaseException:
            self.hold()
            raise

    def release(self) -> None:
        """Ends the section, if there is one, and passes the noted signals to their handlers. If a handler raises that
        is back, the others are restored first."""
        try:
            self.is_held = False
            for number in self._caught:
                if _getsignal(number) is self._note:
                    _signal(number, self._handlers[number])
            if self._actions:
                self._keep_actions()
                self._actions.clear()
        except BaseException:
            self.release()
            raise
        finally:
            self._handle_noted()

    def _keep_actions(self) -> None:
        """Installs what a library in C had installed, which `signal` has replaced."""
        if self._plain is None:
            _sigaction(next(iter(self._actions)), None, self._action)
            self._plain = self._action.handler, self._action.flags
        for number, action in self._actions.items():
            _sigaction(number, action, None)

    def _noted_or_handled(self, number: int, frame: FrameType | None) -> None:
        """The handler of all signals during a section, and for the moment in which they are replaced and restored."""
        if not self.is_held:
            self._handlers[number](number, frame)
            return
        self._noted.setdefault(number, frame)
        if self._wake is not None:
            self._wake()

    def _handle_noted(self) -> None:
        """As the system does with pending signals: in their order, each once, by the handler that is installed now."""
        if not self._noted:
            return
        number = next(iter(self._noted))
        frame = self._noted.pop(number)
        try:
            handler = _getsignal(number)
            if callable(handler):
                handler(number, frame)
            else:
                raise_signal(number)
        finally:
            self._handle_noted()

    def handle(self) -> None:
        """Passes the noted signals to their handlers now. Call it where nothing is half done. The section continues.

        Raises:
            HandlerRaised: a handler raised.
        """
        if not self._noted or not self.is_held or threading.get_ident() != self.main:
            return
        try:
            self.release()
        except BaseException as error:  # noqa: BLE001  the end of the section raises it
            raise HandlerRaised(error) from None
        finally:
            self.hold()

    def let_run(self, code: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Calls code of the program, which signals may interrupt as if it were not called by kvd."""
        if not self.is_held or threading.get_ident() != self.main:
            return code(*args, **kwargs)
        try:
            self.release()
            return code(*args, **kwargs)
        finally:
            self.hold()

    def watch(self) -> None:
        """Notice from now on when a handler is installed: `signal.signal` looks `_signal.signal` up at each call.

        A handler that raises here leaves `_installing` too large, never too small: sections ask for all handlers then.
        """

        @functools.wraps(_signal)
        def signal(number: int, handler: Any, /) -> Any:
            self._installing += 1
            try:
                return _signal(number, handler)
            finally:
                self._change = object()
                self._installing -= 1

        signal_module.signal = signal

    def stop(self) -> None:
        """Open no more sections: the interpreter exits, and clears the globals that `hold` and `release` need."""
        self.main = None

    # ── waits, on any thread ──

    def begin_wait(self, wake: Callable[[], object]) -> Interrupt:
        """Has `wake` called when a signal arrives, until `end_wait` of the result. Check `came` after that and before
        blocking; if it is set, call `handle` when the wait has ended."""
        if not self.is_held or threading.get_ident() != self.main:
            return _NEVER
        self._wake = wake
        return self

    def end_wait(self) -> None:
        self._wake = None

    @property
    def came(self) -> bool:
        return bool(self._noted)

    def pause(self, woken: SimpleQueue[None], seconds: float | None) -> None:
        """Waits until something is put into `woken`, which it takes out, or until the time is up. May return early.

        Raises:
            HandlerRaised: a signal arrived, and its handler raised.
        """
        interrupt = self.begin_wait(functools.partial(woken.put, None))
        try:
            if not interrupt.came:
                woken.get(timeout=LONGEST_PAUSE_S if seconds is None else min(max(seconds, 0.0), LONGEST_PAUSE_S))
        except Empty:
            pass
        finally:
            interrupt.end_wait()
        if interrupt.came:
            self.handle()

    def forked(self) -> None:
        """This is a child process. The thread that forked is its main thread; the signals were the parent's."""
        self.main = threading.get_ident()
        self._noted.clear()
        self._wake = None  # it would wake the parent
        self.release()


signals = HeldSignals()
signals.watch()
os.register_at_fork(after_in_child=signals.forked)
atexit.register(signals.stop)  # it runs after the handlers of the modules that import this one, which close stores


# ── decorators of public calls ──


def uninterrupted(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that is a section. Of a coroutine function or a generator function, each step is one.

    Finalizers call it while the interpreter exits, so sections of functions refer to no globals.
    """
    get_ident, held, raised_by_handler = threading.get_ident, signals, HandlerRaised
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def in_steps(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
            return await _Stepped(functools.partial(function, *args, **kwargs))

        return in_steps  # type: ignore[return-value]
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
            return _stepped(functools.partial(function, *args, **kwargs))

        return generator

    @functools.wraps(function)
    def whole(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if get_ident() != held.main or held.is_held:
            return function(*args, **kwargs)
        try:
            held.hold()
            return function(*args, **kwargs)
        except raised_by_handler as raised:
            error = raised.error
        finally:
            held.release()
        try:
            raise error  # here, since an exception raised in an `except` block gets a context
        finally:
            del error  # it refers to this frame

    return whole


_SPECIAL = frozenset({"__exit__", "__aexit__", "__next__", "__anext__", "__await__", "__del__"})


def with_uninterrupted_methods(cls: Class) -> Class:
    """Makes each public method of the class a section."""
    for name, member in list(vars(cls).items()):
        if isinstance(member, FunctionType) and (name in _SPECIAL or not name.startswith("_")):
            setattr(cls, name, uninterrupted(member))
    return cls


class _Stepped:
    """Awaits a coroutine, each step of which is a section."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin

    def __await__(self) -> Generator[Any, Any, Any]:
        return _stepped(self._begin)


def _stepped(begin: Callable[[], Any]) -> Generator[Any, Any, Any]:
    """Runs a coroutine or a generator. What a handler raises after a step is thrown into it, so that it cleans up."""
    inner: Any = None

    def first(argument: Any) -> Any:
        nonlocal inner
        inner = begin()
        return inner.send(argument)

    resume: Callable[[Any], Any] = first
    argument: Any = None
    while True:
        awaited: list[Any] = []  # what the step waits for; empty: it was the last
        try:
            _step(awaited, resume, argument)
        except StopIteration as end:
            return end.value
        except BaseException as error:
            if not awaited:
                raise
            resume, argument = inner.throw, HandlerRaised(error)
            continue
        try:
            argument, resume = (yield awaited[0]), inner.send
        except BaseException as error:  # noqa: BLE001  it is for the coroutine
            resume, argument = inner.throw, error


@uninterrupted
def _step(awaited: list[Any], resume: Callable[[Any], Any], argument: Any) -> None:
    awaited.append(resume(argument))

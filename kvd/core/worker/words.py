"""What a call is called in texts: in the words of the program that made it, never in those of the protocol."""

from __future__ import annotations

from typing import Any

from kvd.core import requests
from kvd.core.worker.in_flight import InFlight
from kvd.protocol import messages
from kvd.protocol.messages import ADD, ANY_CLOCK, Departure

MAX_NAMES = 3  # of keys in one text

_OF_REQUEST: dict[type[Any], str] = {
    requests.JoinCluster: "create",
    requests.InitKeys: "init",
    requests.DeleteKeys: "delete",
    requests.DescribeKey: "look-up",
    requests.TakeBack: "the end of a call",
    requests.Flush: "flush",
    requests.Rewind: "rewind",
    requests.ClockOf: "clock",
    requests.SaidAt: "snapshot",
    requests.Tell: "snapshot",
    requests.ToldAt: "snapshot",
    requests.SchedulerStatus: "status",
}
_OF_MESSAGE: dict[type[Any], str] = {
    messages.SetOptimizer: "set_optimizer",
    messages.UpdateOptimizer: "update_optimizer",
    messages.CompressorQuery: "set_gradient_compression",
    messages.OptimizerQuery: "a look at the optimizer",
    messages.FetchState: "save_optimizer_states",
    messages.StoreState: "load_optimizer_states",
    messages.ListRows: "export_table",
    messages.Command: "send_command_to_servers",
    messages.ListKeys: "keys",
    messages.ClockQuery: "version",
    messages.StatusQuery: "status",
    messages.OfferState: "an offer of this worker's state",
    messages.WantState: "the state of another worker",
    messages.FetchPart: "the state of another worker",
    messages.StatePart: "the state for another worker",
}


def title_of(call: InFlight) -> str:
    """What the program called, with its keys, and of a push or pull that has begun, its number."""
    request = call.request
    if isinstance(request, requests.Barrier):
        return barrier_title(request.name)
    if isinstance(request, requests.StandBy):
        return f"join(until={request.name.partition(':')[2]!r})"
    title = _name_of(request)
    names = [key.name for key in call.keys[:MAX_NAMES]] or list(filter(None, [getattr(request, "key", "")]))
    if names:
        title += f" of {', '.join(map(repr, names))}{' …' if len(call.keys) > MAX_NAMES else ''}"
    clock = _clock_of(call)
    if clock is not None:
        title += f" ({'push' if call.is_push else 'version'} {clock})"
    return title


def _name_of(request: requests.Request) -> str:
    if isinstance(request, requests.Transfer):
        if request.how != ADD:
            return "broadcast" if request.pull else "assignment"
        if request.some_rows and request.pull:
            return "row_sparse_pull"
        return "pushpull" if request.push and request.pull else "push" if request.push else "pull"
    if isinstance(request, requests.DescribeKey) and request.wait:
        return "broadcast"  # only there, look-ups wait for keys
    if isinstance(request, requests.Depart):
        return "join" if request.departure is Departure.DONE else "close"
    if isinstance(request, requests.Control | requests.SliceControl):
        return _OF_MESSAGE.get(type(request.messages[0]), "request") if request.messages else "request"
    return _OF_REQUEST.get(type(request), "call")


def barrier_title(name: str) -> str:
    """Names are "user:NAME" for those of the program, and "kvd:…" where a call of the store consists of barriers."""
    kind, _, own = name.partition(":")
    if kind == "user":
        return f"barrier {own!r}" if own else "barrier"
    if name.startswith("kvd:broadcast"):
        return f"broadcast of {name.split(':', 2)[-1]!r}"
    if kind == "level":
        return f"join(until={own!r})"
    for call in ("snapshot", "restore"):
        if name.startswith(f"kvd:{call}"):
            return call
    return "close" if name == "kvd:exit" else f"barrier {name!r}"


def _clock_of(call: InFlight) -> int | None:
    """The clock that a push goes under, or the version that a pull waits for, of its first key."""
    for entry in sorted(call.entries, key=lambda entry: entry.request):
        message: Any = entry.send.message
        if isinstance(message, messages.PushBatch | messages.PullBatch):
            return None if message.clock == ANY_CLOCK else message.clock
        if isinstance(message, messages.Push | messages.Pull | messages.PullRows):
            clock = (message.part if isinstance(message, messages.PullRows) else message.parts[0]).clock
            return None if clock == ANY_CLOCK else clock
    return None

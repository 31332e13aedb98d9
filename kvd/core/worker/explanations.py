"""What people are told about a call that waits: for whom, how that node is, and what it has not done yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvd.core.machine import SCHEDULER, Peer
from kvd.core.membership import in_words, name_of
from kvd.core.outbox import QUEUED, Entry
from kvd.core.session import SchedulerSession
from kvd.core.worker.holds import Act, Blocked, Holds
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.words import title_of
from kvd.errors import Outcome, RequestTimeout
from kvd.protocol.messages import Enter, MemberState, StandBy

MAX_NAMED = 3  # nodes that a text describes; it counts the others


class Reason(NamedTuple):
    """Whom a call waits for.

    Attributes:
        nodes: their names.
        texts: what is to be said of each, in the same order; there may be fewer.
    """

    nodes: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        shown = "; ".join(self.texts[:MAX_NAMED]) or "nobody in particular"
        more = len(self.nodes) - min(len(self.texts), MAX_NAMED)
        return f"{shown}; and {more} more" if more > 0 and self.texts else shown


class Explainer:
    """Puts together what the view, the servers and the scheduler said."""

    def __init__(self, session: SchedulerSession, holds: Holds) -> None:
        self._session = session
        self._view = session.view
        self._holds = holds

    # ── texts ──

    def notice(self, call: InFlight, entries: Sequence[Entry], now: float) -> str:
        """For the log."""
        reason = self.reason(entries, now)
        text = f"{title_of(call)} has waited {_seconds(now - call.begun)} s for {reason.text}"
        dead = [name for name in reason.nodes if self._is_dead_worker(name)]
        return f"{text}. {_remedies(dead)}" if dead else text

    def timeout_error(self, call: InFlight, reason: Reason, now: float) -> RequestTimeout:
        """What the caller is told at the deadline: whether anything of the call was sent, and whom it waits for."""
        outcome = self.outcome(call)
        sent = call.is_push and outcome == "unknown"
        hint = "its pushes are still on their way" if sent else "kvd status shows who is there"
        waited = _seconds(now - call.begun)
        text = f"{title_of(call)} did not finish within {waited} s; it waits for {reason.text}; {hint}"
        return RequestTimeout(text, outcome=outcome, waiting_for=reason.nodes)

    @staticmethod
    def outcome(call: InFlight) -> Outcome:
        """What its error says of a call that ends now."""
        return "unknown" if call.may_have_happened else "not_sent"

    def stuck_line(self, call: InFlight, entries: Sequence[Entry], now: float) -> str:
        """A few words for the list of a deadlock. Of a barrier, the scheduler adds who is missing."""
        if any(isinstance(entry.send.message, Enter | StandBy) for entry in entries):
            return title_of(call)
        names = ", ".join(self.reason(entries, now).nodes)
        what = next((blocked for entry in entries if (blocked := self._holds.blocked(entry)).key), None)
        act = "" if what is None else f" to {what.act.infinitive} {what.key!r}"
        return f"{title_of(call)} waits for {names or 'others'}{act}"

    # ── whom it waits for ──

    def reason(self, entries: Sequence[Entry], now: float) -> Reason:
        """Nodes that were never there; then the workers that hold it back; then the nodes that do not answer."""
        if not self._session.joined:
            return Reason(("scheduler",), (self._scheduler(now),))
        found: dict[str, str] = {name_of("server", rank): "" for rank in self._view.missing_servers()}
        held = [entry for entry in entries if self._holds.is_held(entry, now)]
        others = [entry for entry in entries if not self._holds.is_held(entry, now)]
        for entry in held:
            blocked = self._holds.blocked(entry)
            for absent in blocked.absent:
                name = name_of("worker", absent.rank)
                if name not in found:
                    found[name] = f"{self._node('worker', absent.rank, now)}, {_not_done(blocked, absent.clock)}"
        if not held:
            found |= {name: "" for name in self._suspects() if name not in found}
        for entry in others:
            name = self._name_of(entry.peer)
            if name and not found.get(name):
                found[name] = self._unheld(entry.peer, others, now)
        texts = [text or self._of_name(name, now) for name, text in found.items()]
        return Reason(tuple(found), tuple(texts))

    def _suspects(self) -> Iterable[str]:
        """Who may be behind it, as far as the view knows: workers that never came or are dead, and quiet nodes."""
        yield from (name_of("worker", rank) for rank in self._view.required_ranks() if self._view.worker(rank) is None)
        yield from (name_of("worker", rank) for rank in self._view.dead_workers())
        yield from (name_of(quiet.role, quiet.rank) for quiet in self._session.quiet)

    def place_of(self, peer: Peer) -> tuple[str, int] | None:
        """The role and rank of a server that is in the view."""
        member = None if peer == SCHEDULER else self._view.by_incarnation(int(peer))
        return None if member is None else (member.role, member.rank)

    def _name_of(self, peer: Peer) -> str:
        """ "" for a server that was never there: it is missing in the view, too."""
        place = self.place_of(peer)
        return name_of(*place) if place else "scheduler" if peer == SCHEDULER else ""

    # ── how a node is ──

    def _is_dead_worker(self, name: str) -> bool:
        """Return whether the process of this node, a worker, has ended or is silent for too long."""
        role, _, rank = name.rpartition(" ")
        member = self._view.members.get((role, int(rank))) if role == "worker" else None
        if member is None or member.state is not MemberState.ACTIVE:
            return member is not None and member.state is MemberState.DEAD
        known = self._holds.fact(role, member.rank)
        return known is not None and bool(known.fact.ended)

    def _of_name(self, name: str, now: float) -> str:
        role, _, rank = name.rpartition(" ")
        return self._node(role, int(rank), now)

    def _unheld(self, peer: Peer, entries: Sequence[Entry], now: float) -> str:
        """A server, or the scheduler, that has not answered, or not to the end."""
        place = self.place_of(peer)
        who = self._scheduler(now) if place is None else self._identity(*place)
        if self._holds.answers_since_asked(peer):
            return f"{who}: it answers, and has not finished this yet"
        sent_at = [entry.sent_at for entry in entries if entry.peer == peer and entry.state is not QUEUED]
        if not sent_at:
            return f"{who}: nothing could be sent to it yet"
        since = max(min(sent_at), self._holds.answered_at(peer))
        return f"{who}: no answer for {_seconds(now - since)} s"

    def _node(self, role: str, rank: int, now: float) -> str:
        """Who it is, and how it is."""
        member = self._view.members.get((role, rank))
        who = self._identity(role, rank)
        if member is None:
            return f"{who}: has not joined yet"
        if member.state is not MemberState.ACTIVE:
            reason = f" ({member.reason})" if member.reason else ""
            return f"{who}: {in_words(member.state)}{reason}"
        known = self._holds.fact(role, rank)
        if known is not None and known.fact.ended:
            return f"{who}: {known.fact.ended}"
        quiet = next((entry.age_s for entry in self._session.quiet if (entry.role, entry.rank) == (role, rank)), None)
        if quiet is not None:
            return f"{who}: silent for {_seconds(quiet)} s"
        if known is None:
            return who
        return f"{who}: alive, heard of {known.fact.heard_s + now - known.at:.1f} s ago"

    def _identity(self, role: str, rank: int) -> str:
        """Its name, and where to find it."""
        member = self._view.members.get((role, rank))
        if member is None:
            return name_of(role, rank)
        where = [f"node {member.node_id}"]
        known = self._holds.fact(role, rank)
        if known is not None:
            where += [f"host {known.fact.host_name}"] if known.fact.host_name else []
            where.append(f"pid {known.fact.pid}")
        where += [member.address] if member.address else []
        return f"{name_of(role, rank)} ({', '.join(where)})"

    def _scheduler(self, now: float) -> str:
        heard = f", last heard {_seconds(now - self._session.heard_at)} s ago" if self._session.heard else ""
        return f"the scheduler at {self._session.scheduler_address}{heard}"


def _seconds(duration_s: float) -> str:
    """Three digits, or all of a whole number: "0.41", "12.3", "1800"."""
    return f"{duration_s:.3g}" if duration_s < 100 else f"{duration_s:.0f}"


def _remedies(dead: Sequence[str]) -> str:
    """Return what ends a wait for workers that died."""
    names = ", ".join(dead[:MAX_NAMED]) + (f" and {len(dead) - MAX_NAMED} more" if len(dead) > MAX_NAMED else "")
    return (
        f"Start {names} again under the same node id, as `kvd launch --restart N` does; or start the scheduler with "
        f'on_worker_loss = "shrink", and the other workers continue without a worker that dies'
    )


def _not_done(blocked: Blocked, clock: int) -> str:
    """What a worker has not done, of which others wait."""
    if not blocked.key:
        return "has not come to it"
    when = f" since push {clock}" if clock else " yet" if blocked.act is Act.PUSH else ""
    return f"has not {blocked.act.participle} {blocked.key!r}{when}"

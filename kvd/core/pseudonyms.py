"""What only servers are told of workers: who knows the incarnation of a process can speak for it."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from kvd.protocol.messages import Member, View


def pseudonym(incarnation: int) -> int:
    """A number that is always the same for this incarnation, and does not show it."""
    digest = blake2b(incarnation.to_bytes(8, "big"), digest_size=8, person=b"kvd").digest()
    return (int.from_bytes(digest, "big") >> 3) + 1


def public_view(view: View) -> View:
    """The view for all but servers: without the incarnations of workers, the names of keys, and the runs' tokens.

    The incarnations of servers stay: they name connections. With keys for each node, no other key can use them.
    """
    return replace(view, members=tuple(map(public_member, view.members)), runs=())


def public_member(member: Member) -> Member:
    """A member of such a view."""
    if member.role == "worker":
        return member._replace(incarnation=pseudonym(member.incarnation), principal="")
    return member._replace(principal="") if member.principal else member

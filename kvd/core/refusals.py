"""Errors to refusals and back: what a server or the scheduler sends, and what the caller's program raises."""

from __future__ import annotations

from kvd import errors
from kvd.core.membership import name_of
from kvd.errors import KvdError
from kvd.protocol.messages import MAX_TEXT_CHARS, ErrorCode, Refused
from kvd.protocol.specs import MAX_KEY_CHARS

_CLASSES: dict[ErrorCode, type[errors.RemoteError]] = {
    ErrorCode.REMOTE_ERROR: errors.RemoteError,
    ErrorCode.NOT_ALLOWED: errors.NotAllowed,
    ErrorCode.KEY_NOT_FOUND: errors.KeyNotFound,
    ErrorCode.KEY_EXISTS: errors.KeyExists,
    ErrorCode.SHAPE_MISMATCH: errors.ShapeMismatch,
    ErrorCode.DTYPE_MISMATCH: errors.DtypeMismatch,
    ErrorCode.REPLACED: errors.NotAllowed,
}
_CODES: dict[type[KvdError], ErrorCode] = {
    errors.ProtocolError: ErrorCode.PROTOCOL_ERROR,
    errors.ConfigError: ErrorCode.CONFIG_ERROR,
    **{kind: code for code, kind in _CLASSES.items() if code is not ErrorCode.REPLACED},
}


def code_of(error: KvdError) -> ErrorCode:
    """The code of an error that a job ended with."""
    return _CODES.get(type(error), ErrorCode.REMOTE_ERROR)


def refusal_of(request: int, error: KvdError) -> Refused:
    """The refusal that stands for an error on the wire."""
    key = str(getattr(error, "key", "") or getattr(error, "setting", ""))[:MAX_KEY_CHARS]
    return Refused(request, code_of(error), str(error)[:MAX_TEXT_CHARS], key)


def error_of(refused: Refused, node: str) -> KvdError:
    """The error that a refusal by `node` stands for."""
    nodes = tuple(name_of(*name) for name in refused.nodes)
    if refused.error is ErrorCode.NODE_LOST:
        return errors.NodeLost(refused.text, node=nodes[0] if nodes else "a node", last_seen_s=refused.last_seen_s)
    if refused.error is ErrorCode.BARRIER_BROKEN:
        return errors.BarrierBroken(refused.text, missing=nodes)
    if refused.error is ErrorCode.CONFIG_ERROR:
        return errors.ConfigError(refused.text, setting=refused.key)
    if refused.error is ErrorCode.JOB_ENDED:
        return errors.JobEnded(refused.text, job=refused.key)
    if refused.error is ErrorCode.JOB_BUSY:
        return errors.JobBusy(refused.text, job=refused.key)
    if refused.error is ErrorCode.PROTOCOL_ERROR:
        return errors.ProtocolError(refused.text)
    return _CLASSES[refused.error](refused.text, node=node, key=refused.key)

"""The optimizers that this process knows: the built-in ones and those of other installed distributions."""

from __future__ import annotations

import dataclasses
import functools
import logging

from kvd.optimizer.accumulated import AdaDelta, Ftrl
from kvd.optimizer.delays import DCASGD
from kvd.optimizer.fields import kinds
from kvd.optimizer.langevin import SGLD
from kvd.optimizer.layerwise import LAMB, LARS
from kvd.optimizer.moments import FTML, Adamax, Nadam
from kvd.optimizer.outer import DelayedNesterov
from kvd.optimizer.rules import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, RowWiseAdagrad
from kvd.optimizer.signs import Signum

ENTRY_POINT_GROUP = "kvd.optimizers"
"""The group of entry points in which optimizers of your own are installed on the servers."""

_BUILT_IN: dict[str, type[Optimizer]] = {
    cls.__name__: cls
    for cls in (
        SGD,
        Adam,
        AdamW,
        Adagrad,
        RowWiseAdagrad,
        RMSProp,
        AdaDelta,
        Adamax,
        Nadam,
        Ftrl,
        Signum,
        FTML,
        LARS,
        LAMB,
        SGLD,
        DelayedNesterov,
        DCASGD,
    )
}

_MOST_SLOTS = 3  # FTML's

_COMMON_FIELDS = {"learning_rate", "wd", "rescale_grad", "clip_gradient"}

_log = logging.getLogger(__name__)


def known_optimizers() -> dict[str, type[Optimizer]]:
    """Return the optimizers by the name that they have on the wire.

    The built-in ones go by the name of their class, an installed one by the name of its entry point in the group
    ``kvd.optimizers``. Entry points are loaded once per process; one that cannot be used is left out with a warning
    in the log, since a broken plug-in must not keep a server from starting.
    """
    return _BUILT_IN | _installed()


def row_error(optimizer: Optimizer, key: str) -> str:
    """Return the reason why an optimizer cannot update single rows of a table; empty if it can."""
    kind = type(optimizer)
    if getattr(optimizer, "kernel", None) is not None or (kind in _BUILT_IN.values() and kind.updates_rows):
        return ""
    names = ", ".join([name for name, known in _BUILT_IN.items() if known.updates_rows])
    return f"{kind.__name__} cannot update single rows of table {key!r}; these can: {names}"


def slots_of(optimizer: Optimizer | None) -> int:
    """Return the most numbers that an optimizer keeps per element. An installed one may keep as many as any."""
    if optimizer is None:
        return 0
    if getattr(optimizer, "kernel", None) is not None:
        return _MOST_SLOTS
    match optimizer:
        case SGLD():
            return 0
        case SGD() | Signum() | LARS():
            return 1 if optimizer.momentum else 0
        case Adagrad():
            return 1
        case Adam() | AdamW() | AdaDelta() | Adamax() | Nadam() | Ftrl() | LAMB() | DelayedNesterov():
            return 2
        case RMSProp():
            return 1 + bool(optimizer.centered) + bool(optimizer.momentum)
    return _MOST_SLOTS


@functools.cache
def _installed() -> dict[str, type[Optimizer]]:
    import importlib.metadata  # takes a while, and most processes decode no optimizer

    found: dict[str, type[Optimizer]] = {}
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            cls = entry_point.load()
        except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything
            _log.warning("the optimizer %r cannot be loaded: %s", entry_point.name, error)
            continue
        if reason := _unusable(entry_point.name, cls):
            _log.warning("the optimizer %r is not used: %s", entry_point.name, reason)
        else:
            found[entry_point.name] = cls
    return found


def _unusable(name: str, cls: object) -> str:
    """Return the reason why an entry point is no optimizer; empty if it is one."""
    if name in _BUILT_IN:
        return "the name belongs to a built-in optimizer"
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        return "it is not derived from kvd.optimizer.Optimizer"
    if not dataclasses.is_dataclass(cls):
        return "it is not a dataclass"
    if not callable(getattr(cls, "kernel", None)):
        return "it has no kernel()"
    try:
        missing = _COMMON_FIELDS - kinds(cls).keys()
    except Exception as error:  # noqa: BLE001 - resolving foreign annotations evaluates them
        return f"the types of its fields cannot be resolved: {error}"
    return f"it has no field {', '.join(sorted(missing))}" if missing else ""

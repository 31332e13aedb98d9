"""Optimizers as pure data: names and numbers that say what the servers compute.

An optimizer of kvd is a frozen dataclass. It holds no state, and no code crosses the wire: the servers look up the
name and compute (``kvd.compute.optimizers``). ``learning_rate`` is a number or a value of
:mod:`kvd.optimizer.schedule`::

    kv.set_optimizer(SGD(schedule.Warmup(schedule.Cosine(0.1, steps=10_000), steps=500), momentum=0.9))

An optimizer of your own is a dataclass derived from :class:`Optimizer` that is installed on the servers as an entry
point in the group ``kvd.optimizers``; see :class:`Optimizer` for what it has to define.
"""

from kvd.optimizer import schedule
from kvd.optimizer.accumulated import AdaDelta, Ftrl
from kvd.optimizer.delays import DCASGD
from kvd.optimizer.langevin import SGLD
from kvd.optimizer.layerwise import LAMB, LARS
from kvd.optimizer.moments import FTML, Adamax, Nadam
from kvd.optimizer.outer import DelayedNesterov
from kvd.optimizer.registry import ENTRY_POINT_GROUP, known_optimizers
from kvd.optimizer.rules import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, RowWiseAdagrad
from kvd.optimizer.signs import Signum
from kvd.optimizer.wire import changes_from_wire, changes_to_wire, from_wire, to_wire, with_hyperparameters

__all__ = [
    "Optimizer",
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSProp",
    "RowWiseAdagrad",
    "AdaDelta",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Signum",
    "FTML",
    "LARS",
    "LAMB",
    "SGLD",
    "DelayedNesterov",
    "DCASGD",
    "schedule",
    "known_optimizers",
    "ENTRY_POINT_GROUP",
    "to_wire",
    "from_wire",
    "with_hyperparameters",
    "changes_to_wire",
    "changes_from_wire",
]

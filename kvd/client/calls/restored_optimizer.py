"""A program that begins again from a snapshot sets the optimizer that it set before."""

from __future__ import annotations

import logging

from kvd.optimizer import Optimizer

logger = logging.getLogger("kvd")


def is_kept(restored: Optimizer | None, wanted: Optimizer | None) -> bool:
    """Whether the optimizer of a snapshot stays, though a program sets one at a place that lies before the snapshot.

    It stays: after that place the program may have changed the hyperparameters, or set the one that the snapshot has.
    If there is none, the one that is wanted is set.
    """
    if restored is None:
        return False
    if restored != wanted:
        logger.warning(
            "the optimizer stays %r, with which the snapshot was taken; set_optimizer(%r) lies before that place of "
            "the program: to change it, call update_optimizer or set_optimizer after the first step",
            restored,
            wanted,
        )
    return True

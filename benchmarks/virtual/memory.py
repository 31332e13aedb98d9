"""Memory that only counts: what stands in the place of values, and how much of it a node has at once."""

from __future__ import annotations


class Ledger:
    """The memory for values of one node, in bytes.

    Attributes:
        nbytes: what it has now.
        peak_nbytes: the most that it has had.
    """

    def __init__(self) -> None:
        self.nbytes = self.peak_nbytes = 0

    def change(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)


class Memory:
    """Stands for a buffer of some bytes. It counts until the last reference to it is gone, as real buffers do."""

    __slots__ = ("_ledger", "nbytes")

    def __init__(self, nbytes: int, ledger: Ledger) -> None:
        self.nbytes = nbytes
        self._ledger = ledger
        ledger.change(nbytes)

    def __del__(self) -> None:
        self._ledger.change(-self.nbytes)

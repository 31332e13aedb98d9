"""Objects that belong to the process which created them."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

from kvd.errors import NotCopyable


class ProcessBound:
    """Stands on the threads, sockets and memory of this process, so it cannot be copied, pickled or saved.

    Pickling, ``copy``, ``torch.save`` and arguments of other processes all ask `__reduce_ex__` for the parts to copy.

    Attributes:
        _NOT_COPYABLE: what it is and what to do, for the error.
    """

    _NOT_COPYABLE: ClassVar[str]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise NotCopyable(self._NOT_COPYABLE)

"""Memory that is filled again when the last thing in it is gone.

New memory costs a page fault for each 4 KiB, and the C library gives back to the system what was
freed: at the speeds here that is a fifth of the time. So memory comes in pieces, lent out to
arrays. Whoever keeps an array, or a view of it, keeps its piece; then new ones are made.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 8 * 2**20
"""Of :class:`ReadBufferPool`: NumPy asks for huge pages from 4 MiB on."""


def pooled_view(piece: NDArray[np.uint8], name: Any, done: deque[Any]) -> NDArray[np.uint8]:
    """``piece`` again; when nothing refers to this array any more, ``name`` is put in ``done``."""
    return np.asarray(_PooledView(piece, name, done))


class _PooledView:
    def __init__(self, piece: NDArray[np.uint8], name: Any, done: deque[Any]) -> None:
        self.__array_interface__ = piece.__array_interface__
        self._piece, self._name, self._done = piece, name, done

    def __del__(self) -> None:
        # Nothing that takes a lock: this may run in the middle of anything.
        self._done.append(self._name)


class ReadBufferPool:
    """Room for the files that a process reads, several to a piece. Any thread may take some."""

    def __init__(self) -> None:
        self._free: deque[NDArray[np.uint8]] = deque()
        self._each = threading.local()

    def take(self, size: int) -> memoryview:
        """Room for ``size`` bytes."""
        if size > PIECE_BYTES:
            return memoryview(bytearray(size))
        left: memoryview = getattr(self._each, "left", memoryview(b""))
        if len(left) < size:
            left = self._each.left = self._new()
        self._each.left = left[size:]
        return left[:size]

    def _new(self) -> memoryview:
        try:
            piece = self._free.pop()
        except IndexError:
            piece = np.empty(PIECE_BYTES, np.uint8)
        return pooled_view(piece, piece, self._free).data

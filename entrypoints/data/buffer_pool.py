"""Memory of batches, in the trainer's process or shared by the loader's, used again and again.

Whoever keeps tensors keeps their pieces: :mod:`sm_train.entrypoints.data.reused_memory`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.data.reused_memory import pooled_view
from torch import Tensor

BufferLayout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and types of the tensors that lie one behind the other in a piece."""

BufferPool = Callable[[BufferLayout], Sequence[Tensor]]
"""Makes room for the tensors of a layout."""

_ALIGNED = 64  # bytes: a cache line


@dataclass(frozen=True)
class BufferHandle:
    """Tells the trainer of a piece; ``memory`` is there the first time that it is lent."""

    buffer_id: int
    layout: BufferLayout
    memory: Tensor | None


def layout_bytes(layout: BufferLayout) -> int:
    """What a piece must hold."""
    return sum(_padded(shape, kind) for shape, kind in layout)


class LocalBufferPool:
    """Pieces of ``piece_bytes`` for batches that do not leave the process."""

    def __init__(self, piece_bytes: int) -> None:
        self._bytes = piece_bytes
        self._free: deque[NDArray[np.uint8]] = deque()

    def allocate(self, layout: BufferLayout) -> list[Tensor]:
        """Room for the tensors of ``layout``, of at most ``piece_bytes``."""
        piece = self._free.pop() if self._free else np.empty(self._bytes, np.uint8)
        return _tensors(pooled_view(piece, piece, self._free), layout)


class SharedBufferPool:
    """A loader's process, which shares its pieces with the trainer.

    ``returned`` brings the numbers of those that may be filled again.
    """

    def __init__(self, returned: SimpleQueue[int], piece_bytes: int) -> None:
        self._returned, self._bytes = returned, piece_bytes
        self._pieces: list[Tensor] = []
        self._free: list[int] = []
        self._new: set[int] = set()
        self._numbers: dict[int, int] = {}

    def allocate(self, layout: BufferLayout) -> list[Tensor]:
        """Room for the tensors of ``layout``, of at most ``piece_bytes``."""
        while not self._returned.empty():
            self._free.append(self._returned.get())
        # The last one returned is the likeliest to be in a cache.
        number = self._free.pop() if self._free else self._make()
        return _tensors(self._pieces[number].numpy(), layout)

    def handle(self, tensors: Sequence[Tensor]) -> BufferHandle:
        """What to tell the trainer of the piece that :meth:`allocate` made ``tensors`` in."""
        number = self._numbers[tensors[0].untyped_storage().data_ptr()]
        layout = tuple((tuple(one.shape), one.dtype) for one in tensors)
        memory = self._pieces[number] if number in self._new else None
        self._new.discard(number)
        return BufferHandle(number, layout, memory)

    def _make(self) -> int:
        number = len(self._pieces)
        like: Any = torch.empty(0, dtype=torch.uint8)
        piece: Tensor = like.new(like._typed_storage()._new_shared(self._bytes))
        self._pieces.append(piece)
        self._new.add(number)
        self._numbers[piece.untyped_storage().data_ptr()] = number
        return number


class SharedBufferClient:
    """The trainer, as it reads what a :class:`SharedBufferPool` shares."""

    def __init__(self, returned: SimpleQueue[int]) -> None:
        self._returned = returned
        self._pieces: dict[int, NDArray[np.uint8]] = {}
        self._done: deque[int] = deque()

    def open(self, loan: BufferHandle) -> list[Tensor]:
        """The tensors of a piece, which is given back when all of them are gone."""
        if loan.memory is not None:
            self._pieces[loan.buffer_id] = loan.memory.numpy()
        piece = self._pieces[loan.buffer_id]
        return _tensors(pooled_view(piece, loan.buffer_id, self._done), loan.layout)

    def release_unused(self) -> None:
        """Tell the loader of all pieces that are not needed any more."""
        while self._done:
            self._returned.put(self._done.popleft())


def _padded(shape: tuple[int, ...], kind: torch.dtype) -> int:
    return -(-math.prod(shape) * kind.itemsize // _ALIGNED) * _ALIGNED


def _tensors(memory: NDArray[np.uint8], layout: BufferLayout) -> list[Tensor]:
    piece = torch.from_numpy(memory)
    tensors, start = [], 0
    for shape, kind in layout:
        content = piece[start : start + math.prod(shape) * kind.itemsize]
        tensors.append(content.view(kind).view(shape))
        start += _padded(shape, kind)
    return tensors

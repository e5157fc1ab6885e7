"""Pools of reused memory for files that are read and for batches.

New memory costs a page fault for each 4 KiB, and the C library returns freed memory to the system:
at the loader's speeds that takes a fifth of the time. So buffers are handed out again as soon as
nothing refers to them any more. Whoever keeps an array or a tensor, or a view of one, keeps its
whole buffer; the pool then makes new ones.

Three pools share this rule:

- :class:`ReadBufferPool`: many small files in one buffer, for packing.
- :class:`LocalBufferPool`: one batch in one buffer, in the trainer's own process.
- :class:`SharedBufferPool` and :class:`SharedBufferClient`: one batch in one buffer of shared
  memory. The loader's process fills it and the trainer's process reads it. Between them travel
  only a :class:`BufferHandle` per batch and, in the other direction, the id of each buffer that
  may be filled again.

Packing uses the first pool where PyTorch is not installed, so PyTorch is imported on first use.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Buffer = NDArray[np.uint8]

READ_BUFFER_BYTES = 8 * 2**20
"""Size of a buffer of :class:`ReadBufferPool`: NumPy requests huge pages from 4 MiB on."""

BufferLayout: TypeAlias = "tuple[tuple[tuple[int, ...], torch.dtype], ...]"
"""Shapes and types of the tensors that lie one after another in a buffer."""

BufferPool: TypeAlias = "Callable[[BufferLayout], Sequence[Tensor]]"
"""Allocates the tensors of a layout in one buffer."""

_ALIGNMENT = 64
"""Tensors start at multiples of this many bytes: a cache line."""


def pooled_view(buffer: Buffer, token: Any, free: deque[Any]) -> Buffer:
    """Return an array over ``buffer`` that appends ``token`` to ``free`` once it is unused.

    NumPy keeps the owner of an array's memory alive in ``array.base``, also for views of the
    array and for tensors made of it. The owner here is a :class:`_BufferLease`, so Python
    finalizes it exactly when the last of them is gone.
    """
    return np.asarray(_BufferLease(buffer, token, free))


class _BufferLease:
    """Owns one use of a buffer."""

    def __init__(self, buffer: Buffer, token: Any, free: deque[Any]) -> None:
        self.__array_interface__ = buffer.__array_interface__
        self._buffer, self._token, self._free = buffer, token, free

    def __del__(self) -> None:
        # May run in any thread, in the middle of anything, so it must not take a lock:
        # deque.append is atomic.
        self._free.append(self._token)


class ReadBufferPool:
    """Memory for the files that a process reads, several to a buffer. Thread-safe."""

    def __init__(self) -> None:
        self._free: deque[Buffer] = deque()
        self._local = threading.local()

    def take(self, size: int) -> memoryview:
        """Return ``size`` bytes of uninitialized memory."""
        if size > READ_BUFFER_BYTES:
            return memoryview(bytearray(size))
        # Each thread cuts slices off a buffer of its own. Every slice is a view of the pooled
        # array, so the buffer is free again when the last file in it is gone.
        rest: memoryview = getattr(self._local, "rest", memoryview(b""))
        if len(rest) < size:
            rest = self._next_buffer()
        self._local.rest = rest[size:]
        return rest[:size]

    def _next_buffer(self) -> memoryview:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(READ_BUFFER_BYTES, np.uint8)
        return pooled_view(buffer, buffer, self._free).data


class LocalBufferPool:
    """Buffers of ``buffer_bytes`` for batches that do not leave the process."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._free: deque[Buffer] = deque()

    def allocate(self, layout: BufferLayout) -> list[Tensor]:
        """Return the tensors of ``layout``, which fits into ``buffer_bytes``."""
        buffer = self._free.pop() if self._free else np.empty(self._buffer_bytes, np.uint8)
        return _tensors(pooled_view(buffer, buffer, self._free), layout)


@dataclass(frozen=True)
class BufferHandle:
    """Identifies the buffer that a batch is in, and its tensors, for the trainer.

    ``memory`` is the shared buffer itself, uint8 (buffer_bytes,), the first time that it is used;
    None later. PyTorch then sends a file descriptor instead of the content, and the trainer maps
    the same memory.
    """

    buffer_id: int
    layout: BufferLayout
    memory: Tensor | None


class SharedBufferPool:
    """The side of the loader's process, which allocates and fills shared buffers.

    A buffer goes through these states: free, filled by :meth:`allocate`, sent with its
    :meth:`handle`, in use by the trainer, unused there, and returned through ``returned``, which
    makes it free again. Only the process that has it touches it: the loader until it sends the
    handle, the trainer until it returns the id. So no lock is needed, and an id is never in two
    places. A buffer is never given up; there are as many as batches were in flight at once, and one
    for each batch that the trainer keeps.
    """

    def __init__(self, returned: SimpleQueue[int], buffer_bytes: int) -> None:
        self._returned, self._buffer_bytes = returned, buffer_bytes
        self._buffers: list[Tensor] = []
        self._free: list[int] = []
        self._unsent: set[int] = set()
        self._id_by_address: dict[int, int] = {}

    def allocate(self, layout: BufferLayout) -> list[Tensor]:
        """Return the tensors of ``layout``, which fits into ``buffer_bytes``."""
        while not self._returned.empty():
            self._free.append(self._returned.get())
        # The buffer returned last is the likeliest to be in a cache.
        buffer_id = self._free.pop() if self._free else self._new_buffer()
        return _tensors(self._buffers[buffer_id].numpy(), layout)

    def handle(self, tensors: Sequence[Tensor]) -> BufferHandle:
        """Return the handle of the buffer that :meth:`allocate` made ``tensors`` in."""
        # All tensors of a batch are views of one storage, which starts where the buffer does: its
        # address identifies the buffer.
        buffer_id = self._id_by_address[tensors[0].untyped_storage().data_ptr()]
        layout = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        memory = self._buffers[buffer_id] if buffer_id in self._unsent else None
        self._unsent.discard(buffer_id)
        return BufferHandle(buffer_id, layout, memory)

    def _new_buffer(self) -> int:
        import torch

        buffer_id = len(self._buffers)
        # PyTorch has no public call that allocates shared memory: share_memory_() copies an
        # ordinary tensor, whose pages would all have to be written first. _new_shared is what
        # torch.utils.data's own collate function calls for a batch.
        like: Any = torch.empty(0, dtype=torch.uint8)
        buffer: Tensor = like.new(like._typed_storage()._new_shared(self._buffer_bytes))
        self._buffers.append(buffer)
        self._unsent.add(buffer_id)
        self._id_by_address[buffer.untyped_storage().data_ptr()] = buffer_id
        return buffer_id


class SharedBufferClient:
    """The trainer's side, which reads the buffers of a :class:`SharedBufferPool`."""

    def __init__(self, returned: SimpleQueue[int]) -> None:
        self._returned = returned
        self._buffers: dict[int, Buffer] = {}
        self._unused: deque[int] = deque()

    def open(self, handle: BufferHandle) -> list[Tensor]:
        """Return the tensors in a buffer; it becomes unused once all of them are gone."""
        if handle.memory is not None:
            self._buffers[handle.buffer_id] = handle.memory.numpy()
        buffer = self._buffers[handle.buffer_id]
        return _tensors(pooled_view(buffer, handle.buffer_id, self._unused), handle.layout)

    def release_unused(self) -> None:
        """Return all unused buffers to the loader's process.

        The queue takes a lock, so finalizers only collect the ids, and the trainer's loop sends
        them.
        """
        while self._unused:
            self._returned.put(self._unused.popleft())


def layout_bytes(layout: BufferLayout) -> int:
    """Return the size of a buffer that holds the tensors of ``layout``."""
    return sum(_padded_bytes(shape, dtype) for shape, dtype in layout)


def _padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _tensors(buffer: Buffer, layout: BufferLayout) -> list[Tensor]:
    """Return the tensors of ``layout`` as views of ``buffer``, uint8 (buffer_bytes,)."""
    import torch

    whole = torch.from_numpy(buffer)
    tensors, start = [], 0
    for shape, dtype in layout:
        content = whole[start : start + math.prod(shape) * dtype.itemsize]
        tensors.append(content.view(dtype).view(shape))
        start += _padded_bytes(shape, dtype)
    return tensors

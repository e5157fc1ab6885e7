"""Reads chosen samples of a shard as they lie in the tar; memory holds a few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sm_train.entrypoints.shards.shard_format import Shard, ShardError
from sm_train.entrypoints.shards.tar_reader import TarError, sample_members
from sm_train.entrypoints.storage.storage import Storage

_READ_BYTES = 16 * 2**20
"""Bytes of neighboring samples that are read with one request."""


def read_samples(
    storage: Storage,
    name: str,
    shard: Shard,
    kept: Sequence[int],
    progress: Callable[[int], None] = lambda read: None,
) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the part of the tar of each of the samples ``kept``, in order.

    ``name`` is the shard's in ``storage``. ``progress`` takes the bytes of the shard that have been
    read or left out since the last call.

    Raises:
        ShardError: the shard has another size or other samples than its index says.
        OSError: it cannot be read.
    """
    stale = f"{storage.address(name)}: is not as in the index"
    if storage.size(name) != shard.bytes:
        raise ShardError(stale)
    done = 0
    with storage.open(name) as file:
        for numbers in _groups(shard.offsets, kept):
            start, stop = shard.offsets[numbers[0]], shard.offsets[numbers[-1] + 1]
            file.seek(start)
            content = memoryview(_read(file.read, stop - start))
            for number in numbers:
                part = content[shard.offsets[number] - start : shard.offsets[number + 1] - start]
                if _key(part) != shard.keys[number]:
                    raise ShardError(stale)
                yield number, part
            progress(stop - done)
            done = stop
    progress(shard.bytes - done)


def _groups(offsets: Sequence[int], kept: Sequence[int]) -> Iterator[list[int]]:
    """Yield neighboring samples that are read at once."""
    group: list[int] = []
    for number in kept:
        is_next = group and number == group[-1] + 1
        if group and (not is_next or offsets[number + 1] - offsets[group[0]] > _READ_BYTES):
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _read(read: Callable[[int], bytes | None], size: int) -> bytes:
    """Read ``size`` bytes, or fewer at the end of the file; a single call may return less."""
    parts: list[bytes] = []
    while size and (part := read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _key(content: memoryview) -> str | None:
    """Return the key of a sample; None if it is damaged."""
    try:
        return sample_members(content)[0]
    except TarError:
        return None

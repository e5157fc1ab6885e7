"""Draws samples of a data set at random, and copies them into a folder of small shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data.selection import Selection, select_samples
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.entrypoints.removal.removal_list import RemovalList
from sm_train.toolkit.packing.shard_set import ShardSet

_END_OF_ARCHIVE = bytes(1024)


@dataclass(frozen=True)
class DrawnSample:
    """What the index has on a sample: its shard and key, the code of its colors, its columns."""

    shard: str
    key: str
    color: str | None
    columns: dict[str, Any]


def draw_samples(
    index: ShardIndex, removals: RemovalList, where: str | None, count: int, seed: int
) -> tuple[int, list[tuple[int, NDArray[np.int64]]]]:
    """Return how many samples training reads, and ``count`` of them: shards with their rows.

    Raises:
        ConditionError: ``where`` is invalid, or selects no sample.
    """
    selection = None if where is None else select_samples(index, where)
    removed = removals.keys_by_shard(index.name_column())
    counts = index.samples if selection is None else selection.counts
    counts = counts.copy()
    rows_left = {
        number: _readable(index, selection, number, removed[name])
        for number, name in enumerate(index.names)
        if name in removed
    }
    for number, rows in rows_left.items():
        counts[number] = len(rows)
    total = int(counts.sum())
    drawn = np.sort(np.random.default_rng(seed).permutation(total)[:count])
    ends = np.cumsum(counts)
    shards = np.searchsorted(ends, drawn, side="right")
    found = []
    for number in np.unique(shards).tolist():
        if number not in rows_left:
            rows_left[number] = _readable(index, selection, number, frozenset())
        in_shard = drawn[shards == number] - (ends[number] - counts[number])
        found.append((number, rows_left[number][in_shard]))
    return total, found


def _readable(
    index: ShardIndex, selection: Selection | None, shard: int, removed: frozenset[str]
) -> NDArray[np.int64]:
    """Return the rows of a shard that training reads."""
    is_read = np.ones(int(index.samples[shard]), np.bool_)
    if selection is not None:
        is_read = selection.is_selected(shard)
    if removed:
        is_read = is_read & [key not in removed for key in index.keys(shard)]
    return np.flatnonzero(is_read)


def copy_samples(
    shards: ShardSet,
    index: ShardIndex,
    drawn: list[tuple[int, NDArray[np.int64]]],
    folder: Path,
) -> Iterator[DrawnSample]:
    """Copy samples into shards of the same names in ``folder``; yield what is known of each.

    Only their bytes are read.
    """
    for number, rows in drawn:
        shard = index.shard(number)
        path = folder / shard.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with shards.storage.open(shards.shard_file(shard.name)) as file, path.open("wb") as copy:
            for row in rows.tolist():
                file.seek(shard.offsets[row])
                copy.write(_read(file, shard.offsets[row + 1] - shard.offsets[row]))
                columns = {name: values[row] for name, values in shard.columns.items()}
                color = shard.colors[row] if shard.colors else None
                yield DrawnSample(shard.name, shard.keys[row], color, columns)
            copy.write(_END_OF_ARCHIVE)


def _read(file: Any, length: int) -> bytes:
    content = b""
    while len(content) < length and (part := file.read(length - len(content))):
        content += part
    return content

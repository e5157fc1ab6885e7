"""Draws samples of a data set at random, and copies them into a folder of small shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.job_interface.index_location import index_path
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.selection import Selection, select_samples
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_index import ShardIndex, write_index
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet

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
) -> list[DrawnSample]:
    """Copy samples into shards of the same names in ``folder``, with an index next to it.

    Return what is known of each. Only their bytes are read; what a shard that was cut short lacks
    is filled with zeros, so that the loader finds it damaged.

    Raises:
        UserError: a shard is missing.
    """
    copies, samples = [], []
    for number, rows in drawn:
        shard = index.shard(number)
        path = folder / shard.name
        path.parent.mkdir(parents=True, exist_ok=True)
        offsets = [0]
        with _opened(shards, shard.name) as file, path.open("wb") as copy:
            for row in rows.tolist():
                file.seek(shard.offsets[row])
                length = shard.offsets[row + 1] - shard.offsets[row]
                copy.write(_read(file, length).ljust(length, b"\0"))
                offsets.append(offsets[-1] + length)
                columns = {name: values[row] for name, values in shard.columns.items()}
                color = shard.colors[row] if shard.colors else None
                samples.append(DrawnSample(shard.name, shard.keys[row], color, columns))
            copy.write(_END_OF_ARCHIVE)
        copies.append(_copied(shard, rows.tolist(), offsets))
    write_index(index_path(folder), copies)
    return samples


def _copied(shard: Shard, rows: list[int], offsets: list[int]) -> Shard:
    """Return the description of a copy with some of the samples of a shard."""
    return Shard(
        shard.name,
        offsets[-1] + len(_END_OF_ARCHIVE),
        shard.blake3,
        tuple(shard.keys[row] for row in rows),
        tuple(offsets),
        tuple(shard.widths[row] for row in rows if shard.widths),
        tuple(shard.heights[row] for row in rows if shard.heights),
        tuple(shard.colors[row] for row in rows if shard.colors),
    )


@contextmanager
def _opened(shards: ShardSet, name: str) -> Iterator[Any]:
    try:
        file = shards.storage.open(shards.shard_file(name))
    except FileNotFoundError:
        raise UserError(
            f"{shards.storage.address(shards.shard_file(name))}: does not exist, but the index "
            f"lists it; `sm-train index {shards.address}` writes it anew"
        ) from None
    with file:
        yield file


def _read(file: Any, length: int) -> bytes:
    content = b""
    while len(content) < length and (part := file.read(length - len(content))):
        content += part
    return content

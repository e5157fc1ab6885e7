"""Which samples of the shards are read: those that fulfil ``data.where``, by the index's columns.

The readers then see shards of the selected samples alone. So the order of samples, and what a
resumed run continues with, are those of a data set that never had the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.sample_metadata.column_types import ColumnTypes, arrow_type
from sm_train.entrypoints.sample_metadata.row_filter import NUMBER, ConditionError, RowFilter
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.shards.shard_index import SampleGroup, ShardIndex

OPTION = "data.where"


@dataclass(frozen=True, eq=False)
class Selection:
    """The selected samples of each shard of an index, in its order.

    ``counts`` are their numbers and ``sizes`` those of all samples, int64 (num_shards,) each, and
    ``masks`` a bit for each sample of a shard. ``left_out`` are the bytes of the other samples of
    each shard, int64 (num_shards,).
    """

    counts: Ints
    masks: tuple[NDArray[np.uint8], ...]
    sizes: Ints
    left_out: Ints

    def is_selected(self, row: int) -> NDArray[np.bool_]:
        """Return whether each sample of the shard in a row of the index is selected."""
        bits = np.unpackbits(self.masks[row], count=int(self.sizes[row]))
        return bits.astype(np.bool_)


def select_samples(
    index: ShardIndex, where: str, *, option: str = OPTION, may_be_empty: bool = False
) -> Selection:
    """Return the samples that fulfil the SQL condition ``where``, which ``option`` states.

    Memory holds a bit for each sample of the index, and a row group of its columns.

    Raises:
        ConditionError: the condition is invalid; or selects no sample, unless the selection
            ``may_be_empty``; or DuckDB is not installed.
        ShardError: the index is damaged.
    """
    columns = list(index.header.columns)
    require_columns(columns, option)
    counts: list[int] = []
    masks: list[NDArray[np.uint8]] = []
    left_out: list[int] = []
    with RowFilter("the index", where, option=option, fix=_FIX) as row_filter:
        used = [name for name in columns if name.lower() in row_filter.columns]
        for group in index.samples_by_group(used):
            mask = row_filter.mask(_numbered(index, group), columns)
            ends = np.cumsum(group.counts)[:-1]
            others = np.where(mask, 0, group.bytes)
            for part, unselected in zip(np.split(mask, ends), np.split(others, ends), strict=True):
                counts.append(int(part.sum()))
                masks.append(np.packbits(part))
                left_out.append(int(unselected.sum()))
    if not any(counts) and not may_be_empty:
        raise ConditionError(f"{option}: none of {index.header.samples:,} samples fulfils {where}")
    return Selection(
        np.array(counts, np.int64),
        tuple(masks),
        index.samples,
        np.array(left_out, np.int64),
    )


_FIX = "a resumed run would read other samples"


def require_columns(columns: Collection[str], option: str = OPTION) -> None:
    """Refuse a condition on an index without columns of samples.

    Raises:
        ConditionError: there are none.
    """
    if not columns:
        raise ConditionError(
            f"{option}: the index has no columns; pack with --index-column, as in "
            "`sm-train pack … --index-column license`"
        )


def require_valid(where: str, columns: ColumnTypes) -> None:
    """Refuse a condition that cannot be used on an index with these columns; no sample is read.

    Raises:
        ConditionError: it is invalid, or may select other samples later; or DuckDB is not
            installed.
    """
    require_columns(columns)
    fields = [pa.field(name, arrow_type(kind)) for name, kind in columns.items()]
    rows = pa.schema([*fields, pa.field(NUMBER, pa.int64())]).empty_table()
    with RowFilter("the index", where, option=OPTION, fix=_FIX) as row_filter:
        row_filter.mask(rows, list(columns))


def _numbered(index: ShardIndex, group: SampleGroup) -> pa.Table:
    """Return the columns of a group with the numbers of its rows."""
    numbers = pa.array(np.arange(len(group.bytes)))
    if not group.columns.num_columns:  # such as "true"
        return pa.table({NUMBER: numbers})
    if group.columns.num_rows != len(numbers):
        raise ShardError(f"{index.path}: damaged: a column lacks values")
    return group.columns.append_column(NUMBER, numbers)

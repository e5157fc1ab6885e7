"""What a set of shards consists of, for the model card and ``sm-train data-report``.

The figures come from the index and from the list of removed samples; nothing is read of the shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from sm_train.entrypoints.job_interface.index_location import holds_streamed
from sm_train.entrypoints.job_interface.job_config import DEFAULT_COLOR
from sm_train.entrypoints.sample_metadata.color_counts import ColorCounts, recorded_color
from sm_train.entrypoints.sample_metadata.column_types import ENRICHED, MADE_CAPTIONS, SOURCE
from sm_train.entrypoints.sample_metadata.dates import is_date, moment
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.selection import Selection, select_samples
from sm_train.entrypoints.shards.shard_index import (
    IndexHeader,
    ShardIndex,
    count_rejected,
    count_values,
)

MOST_VALUES = 20
"""Values of a column that are counted one by one; the others are counted together."""


@dataclass(frozen=True)
class ColumnFacts:
    """The values of a column: the most frequent ``counts``, most first, of ``distinct`` ones.

    ``missing`` samples have none. ``first`` and ``last`` are the smallest and the largest value of
    a column of dates or numbers, times in UTC; None for other texts.
    """

    counts: dict[str, int]
    distinct: int
    missing: int
    first: str | None = None
    last: str | None = None


@dataclass(frozen=True)
class DataFacts:
    """The samples of a set of shards, or of those that a condition ``where`` selects.

    ``columns`` are those of the index. ``origins`` are the buckets or top folders of the images by
    their numbers; None if the index does not have the images' names. ``options`` are those of
    packing, ``rejected`` the inputs that were not packed, by reason, and ``removed`` the samples
    that were removed later, by the day. ``colors`` counts images by what they state about their
    colors. ``made_captions`` are the columns of captions that a function of `sm-train enrich` has
    made, with its name and, if it saw images with another color policy than that of the pack, that
    policy. ``made_columns`` are other columns that one has made. ``streamed`` samples were packed
    as they arrived.
    """

    samples: int
    shards: int
    bytes: int
    where: str | None = None
    columns: dict[str, ColumnFacts] = field(default_factory=dict)
    origins: dict[str, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    made_captions: dict[str, str] = field(default_factory=dict)
    made_columns: dict[str, str] = field(default_factory=dict)
    streamed: int = 0
    colors: ColorCounts = field(default_factory=lambda: ColorCounts.of({}))


def data_facts(
    index: ShardIndex,
    removals: RemovalList,
    columns: Sequence[str] | None = None,
    where: str | None = None,
) -> DataFacts:
    """Return the facts of the shards of ``index``, counted by ``columns``; default: all.

    Memory grows with the number of distinct values.

    Raises:
        ConditionError: ``where`` is invalid.
        ShardError: the index is damaged.
    """
    selection = None if where is None else select_samples(index, where)
    names = [name for name in index.header.columns if columns is None or name in columns]
    counters = {name: Counter[Any]() for name in names}
    origins = Counter[str]()
    for group in index.samples_by_group(names):
        mask = None if selection is None else pa.array(_mask(selection, group.first, group.counts))
        for name in names:
            column = group.columns[name]
            column = column if mask is None else column.filter(mask)
            counters[name].update(count_values(column))
    if SOURCE in counters:
        for source, count in counters.pop(SOURCE).items():
            origins[_origin(source or "")] += count
    header = index.header
    samples = header.samples if selection is None else int(selection.counts.sum())
    return DataFacts(
        samples,
        header.shards,
        header.bytes if selection is None else header.bytes - int(selection.left_out.sum()),
        where,
        {name: _column(counter) for name, counter in counters.items()},
        dict(origins.most_common()) if SOURCE in names else None,
        {name: value for name, value in header.options.items() if name not in _INTERNAL},
        count_rejected(index.rejected()),
        removals.days,
        {
            column: _maker(made, header)
            for column, made in header.options.get(MADE_CAPTIONS, {}).items()
        },
        {
            column: _maker(made, header)
            for made in header.options.get(ENRICHED, [])
            for column in made["columns"]
        },
        _streamed_samples(index, selection),
        ColorCounts.of(header.colors if selection is None else _selected_colors(index, selection)),
    )


def _maker(made: Mapping[str, Any], header: IndexHeader) -> str:
    """Return the function that made a column, and the colors it saw if those of others differ."""
    policy = recorded_color(made)
    is_pack = header.inputs is not None
    if policy == (recorded_color(header.options) if is_pack else DEFAULT_COLOR):
        return str(made["function"])
    return f"{made['function']} (of images with {policy})"


def _selected_colors(index: ShardIndex, selection: Selection) -> Mapping[str, int]:
    """Count the codes of the selected samples; shards without colors say nothing."""
    counted = Counter[str]()
    first = 0
    for lengths, colors in index.colors_by_group():
        rows = range(first, first + len(lengths))
        known = [row for row, length in zip(rows, lengths.tolist(), strict=True) if length]
        if known:
            mask = np.concatenate([selection.is_selected(row) for row in known])
            counted.update(count_values(colors.filter(pa.array(mask)).drop_null()))
        first += len(lengths)
    return counted


def _streamed_samples(index: ShardIndex, selection: Selection | None) -> int:
    counts = index.samples if selection is None else selection.counts
    return sum(
        count
        for name, count in zip(index.names, counts.tolist(), strict=True)
        if holds_streamed(name)
    )


_INTERNAL = frozenset(
    ("samples", "versions", "compressed", "unusable", "index_columns", "keep", ENRICHED)
) | {MADE_CAPTIONS}
"""Options of an index that say nothing about which images are in it."""


def _mask(selection: Selection, first: int, counts: Any) -> Any:
    rows = range(first, first + len(counts))
    return np.concatenate([selection.is_selected(row) for row in rows])


def _origin(source: str) -> str:
    """Return the bucket of an address, or the top folder of a path; ``.`` if it has none."""
    if source.startswith("s3://"):
        return "/".join(source.split("/")[:3])
    folder, slash, _ = source.partition("/")
    return folder if slash else "."


def _column(counter: Counter[Any]) -> ColumnFacts:
    missing = counter.pop(None, 0)
    return ColumnFacts(
        {str(value): count for value, count in counter.most_common(MOST_VALUES)},
        len(counter),
        missing,
        *_extremes(list(counter)),
    )


def _extremes(values: Sequence[Any]) -> tuple[str | None, str | None]:
    """Return the smallest and the largest of dates or numbers; None of other values."""
    if values and all(isinstance(value, int | float | Decimal) for value in values):
        return str(min(values)), str(max(values))
    moments = [found for value in values if (found := moment(value)) is not None]
    if not moments or len(moments) < len(values):
        return None, None
    if all(map(is_date, values)):
        return str(min(moments).date()), str(max(moments).date())
    return min(moments).isoformat(), max(moments).isoformat()


def fact_rows(facts: DataFacts) -> list[tuple[str, str]]:
    """Return the facts as rows of a table: a name and a text each."""
    size = f"{facts.bytes / 1e9:,.3f} GB"
    shards = f"{facts.shards:,} shard{'s' * (facts.shards != 1)}"
    rows = [("samples", f"{facts.samples:,} in {shards}, {size}")]
    if facts.where is not None:
        rows.append(("selected by", _inline(facts.where)))
    if facts.origins is not None:
        rows.append(("origins of the images", _counts(facts.origins)))
    for name, column in facts.columns.items():
        rows.append((f"by `{name}`", _describe(column)))
    if facts.colors.images:
        rows.append(("colors", _inline(facts.colors.describe())))
    if facts.options:
        options = sorted(facts.options.items())
        filters = ", ".join(f"`{name}`: {_inline(str(value))}" for name, value in options)
        rows.append(("filters and options of packing", filters))
    if facts.streamed:
        rows.append(("packed as they arrived", f"{facts.streamed:,} samples"))
    if facts.made_captions:
        rows.append(("captions made by a program", _made(facts.made_captions)))
    if facts.made_columns:
        rows.append(("other columns made by a program", _made(facts.made_columns)))
    if facts.rejected:
        rows.append(("not packed, by reason", _counts(facts.rejected)))
    removed = sum(facts.removed.values())
    when = f": {_counts(facts.removed)}" if removed else ""
    rows.append(("removed later", f"{removed:,}{when}"))
    return rows


def _made(columns: Mapping[str, str]) -> str:
    return ", ".join(
        f"`{_inline(column)}` by `{_inline(function)}`" for column, function in columns.items()
    )


def _describe(column: ColumnFacts) -> str:
    parts = []
    if column.first is not None:
        parts.append(f"from {column.first} to {column.last}")
    parts.append(_counts(column.counts))
    if column.distinct > len(column.counts):
        parts.append(f"and {column.distinct - len(column.counts):,} other values")
    if column.missing:
        parts.append(f"{column.missing:,} without a value")
    return "; ".join(part for part in parts if part)


def _counts(counts: Mapping[str, int]) -> str:
    shown = list(counts.items())[:MOST_VALUES]
    more = f", and {len(counts) - len(shown):,} others" if len(counts) > len(shown) else ""
    return ", ".join(f"{_inline(value)} {count:,}" for value, count in shown) + more


def _inline(value: str) -> str:
    """Return a value as a cell of a Markdown table takes it."""
    return " ".join(value.split()).replace("|", "\\|").replace("`", "'")

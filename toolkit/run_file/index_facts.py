"""What the index says of a run's training data: how many samples, and latents of which resolution.

An index next to the shards in S3 describes what a job reads. One next to ``data.local`` describes
what should be the same shards; it only stands in for what the run file does not state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from heapq import nsmallest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.job_interface.index_location import index_path

if TYPE_CHECKING:
    import boto3
    from sm_train.entrypoints.shards.shard_index import IndexHeader, ShardIndex
    from sm_train.estimators.config.schema import RunConfig


def with_local_index(config: RunConfig, base: Path) -> RunConfig:
    """Return ``config`` with what the index of ``data.local`` says and the run file does not.

    ``base`` is the run file's folder. An index that is missing or damaged changes nothing.
    """
    data = config.data
    if data.local is None or not _is_alone(config):
        return config
    path = index_path(base / data.local)
    header = _read_local_header(path)
    if header is None:
        return config
    return _with(
        config,
        data.samples or _selected(config, header, lambda: _open_local(path)),
        data.latents if data.latents is not None else latents_of(header),
    )


def with_index_file(config: RunConfig, path: Path) -> RunConfig:
    """Return ``config`` with what the index at ``path`` says; unchanged if it cannot be read."""
    header = _read_local_header(path)
    if header is None:
        return config
    samples = _selected(config, header, lambda: _open_local(path))
    return _with(config, samples, latents_of(header))


def _open_local(path: Path) -> ShardIndex:
    from sm_train.entrypoints.shards.shard_index import ShardIndex

    return ShardIndex(path)


def _selected(
    config: RunConfig, header: IndexHeader, open_index: Callable[[], ShardIndex]
) -> int | None:
    """Return the number of samples that ``data.where`` selects; None if that is not known.

    That is so without DuckDB, and with a condition that the index does not have the columns for,
    which ``check`` reports.
    """
    where = config.data.where
    if where is None:
        return header.samples
    from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
    from sm_train.entrypoints.shards.selection import select_samples
    from sm_train.entrypoints.shards.shard_format import ShardError

    with suppress(ConditionError, ShardError, OSError):
        return int(select_samples(open_index(), where, may_be_empty=True).counts.sum())
    return None


def _read_local_header(path: Path) -> IndexHeader | None:
    if not path.is_file():
        return None
    from sm_train.entrypoints.shards.shard_format import ShardError
    from sm_train.entrypoints.shards.shard_index import read_header

    with suppress(OSError, ShardError), path.open("rb", buffering=0) as file:
        return read_header(file, str(path))
    return None


def with_stored_index(config: RunConfig, session: boto3.Session) -> RunConfig:
    """Return ``config`` with what the index in S3 says, which takes precedence over the run file.

    An index that is missing or cannot be read changes nothing: ``check`` reports it.
    """
    if config.index_uri is None or not _is_alone(config):
        return config
    from botocore.exceptions import BotoCoreError, ClientError
    from sm_train.entrypoints.shards.shard_format import ShardError

    with suppress(BotoCoreError, ClientError, OSError, ShardError):
        uri = config.index_uri
        header = read_stored_header(session, uri)
        samples = _selected(config, header, lambda: _open_stored(session, uri))
        return _with(config, samples, latents_of(header))
    return config


def _open_stored(session: boto3.Session, uri: str) -> ShardIndex:
    from sm_train.entrypoints.shards.shard_index import ShardIndex
    from sm_train.entrypoints.storage.object_file import open_object
    from sm_train.entrypoints.storage.store import store_of

    return ShardIndex(uri, open_object(store_of(session), uri))


def read_stored_header(session: boto3.Session, uri: str) -> IndexHeader:
    """Read the header of an index in S3, in two or three small requests.

    Raises:
        ClientError: S3 rejects a request.
        FileNotFoundError: there is no such object.
        ShardError: it is not an index, is damaged, or has another version.
    """
    from sm_train.entrypoints.shards.shard_index import read_header
    from sm_train.entrypoints.storage.object_file import open_object
    from sm_train.entrypoints.storage.store import store_of

    return read_header(open_object(store_of(session), uri), uri)


@dataclass(frozen=True)
class Expiries:
    """When the samples of an index expire, by their column ``column``.

    ``counts`` are the moments and the numbers of samples, ascending, of ``samples`` in all that are
    read. ``earliest`` are the keys of the first samples to expire, with their moments. ``unknown``
    values are no dates. If ``are_dates``, all values are dates without a time, so that their order
    as texts is that of the days. ``is_missing`` is set if the index does not have the column.
    ``shards`` are those that the index describes, and ``channel`` is theirs if a stage mixes
    sources.
    """

    column: str
    samples: int
    counts: tuple[tuple[datetime, int], ...]
    earliest: tuple[tuple[datetime, str], ...]
    unknown: int
    are_dates: bool = False
    is_missing: bool = False
    shards: str = ""
    channel: str | None = None

    def warning(self, end: datetime | None, now: datetime) -> str | None:
        """Return a sentence about the samples that expire before ``end``; None if none do.

        ``end`` is that of the run. Where it is unknown, those count that have expired ``now``.
        """
        of_channel = "" if self.channel is None else f" of channel {self.channel}"
        if self.is_missing:
            return f"data.expiry: the index{of_channel} has no column {self.column}"
        if self.unknown and not self.counts:
            return (
                f"data.expiry: no value of the column {self.column} is a date or a time in ISO "
                f"8601, so it is not known which samples{of_channel} expire"
            )
        limit = now if end is None else end
        expired = sum(count for moment, count in self.counts if moment < limit)
        if not expired:
            return None
        until = "have expired" if end is None else f"expire before the run ends ({limit:%Y-%m-%d})"
        named = [f"{key} on {moment:%Y-%m-%d}" for moment, key in self.earliest if moment < limit]
        more = ", …" if expired > len(named) else ""
        unknown = f"; {self.unknown:,} values are no dates" if self.unknown else ""
        return (
            f"data.expiry: {expired:,} of {self.samples:,} samples{of_channel} {until}, by the "
            f"column {self.column}: {', '.join(named)}{more}{unknown}"
        )


_NAMED_EXPIRIES = 5

_TRAIN = "train"
"""The channel of ``data.uri``."""

DEFAULT_EXPIRY = "expiry"
"""Column that is looked at if there is one."""


def read_expiries(index: ShardIndex, column: str, where: str | None) -> Expiries | None:
    """Return when the samples of ``index`` that fulfil ``where`` expire.

    None without a column of the default name.

    Raises:
        ShardError: the index is damaged.
        ConditionError: the condition is invalid, or DuckDB is not installed.
    """
    if column not in index.header.columns:
        is_default = column == DEFAULT_EXPIRY
        return None if is_default else Expiries(column, 0, (), (), 0, is_missing=True)
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    from sm_train.entrypoints.data_loading.indexed_shards import select_from
    from sm_train.entrypoints.sample_metadata.dates import is_date, moment

    selection = select_from(index, where, may_be_empty=True).selection
    counts = Counter[datetime]()
    earliest: list[tuple[datetime, int, int]] = []
    unknown, are_dates = 0, True
    for first, lengths, values in index.values_by_group(column):
        rows = range(first, first + len(lengths))
        mask = None
        if selection is not None:
            mask = pa.array(np.concatenate([selection.is_selected(row) for row in rows]))
        counted = pc.value_counts(values if mask is None else values.filter(mask)).to_pylist()
        found = Counter[datetime]()
        stored: dict[datetime, list[Any]] = {}
        for value, count in ((entry["values"], entry["counts"]) for entry in counted):
            expiry = moment(value)
            if expiry is not None:
                are_dates = are_dates and is_date(value)
                found[expiry] += count
                stored.setdefault(expiry, []).append(value)
            elif value is not None:
                unknown += count
        counts += found
        ends = np.cumsum(lengths)
        for expiry in nsmallest(_NAMED_EXPIRIES, found):
            is_first = pc.is_in(values, value_set=pa.array(stored[expiry], values.type))
            chosen = is_first if mask is None else pc.and_(is_first, mask)
            for number in pc.indices_nonzero(chosen).to_pylist()[:_NAMED_EXPIRIES]:
                shard = int(np.searchsorted(ends, number, side="right"))
                sample = number - int(ends[shard] - lengths[shard])
                earliest.append((expiry, first + shard, sample))
        earliest = nsmallest(_NAMED_EXPIRIES, earliest)
    samples = index.header.samples if selection is None else int(selection.counts.sum())
    named = tuple((expiry, index.keys(shard)[sample]) for expiry, shard, sample in earliest)
    moments = tuple(sorted(counts.items()))
    return Expiries(column, samples, moments, named, unknown, are_dates and not unknown)


def local_expiries(config: RunConfig, path: Path) -> tuple[Expiries, ...]:
    """Return when the samples of ``data.uri`` expire that stages read, by its index at ``path``."""
    return _expiries(config, lambda uri: _open_local(path) if uri == config.index_uri else None)


def stored_expiries(config: RunConfig, session: boto3.Session) -> tuple[Expiries, ...]:
    """Return when the samples expire that stages read, by the indexes in S3 that tell."""
    return _expiries(config, lambda uri: _open_stored(session, uri))


def _expiries(
    config: RunConfig, open_index: Callable[[str], ShardIndex | None]
) -> tuple[Expiries, ...]:
    """Return when samples expire. An index that cannot be read is reported by ``check``."""
    from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
    from sm_train.entrypoints.shards.shard_format import ShardError

    found = []
    for channel, where in _read_selections(config):
        shards = config.data.uri if channel in (None, _TRAIN) else config.channels[channel].uri
        uri = config.index_uri if channel in (None, _TRAIN) else config.source_indexes.get(channel)
        if uri is None:
            continue
        with suppress(*_aws_errors(), OSError, ShardError, ConditionError):
            index = open_index(uri)
            expiries = None
            if index is not None:
                expiries = read_expiries(index, config.data.expiry, where)
            if expiries is not None:
                found.append(replace(expiries, shards=shards or "", channel=channel))
    return tuple(found)


def _aws_errors() -> tuple[type[Exception], ...]:
    """Return the errors of AWS requests; none without the packages that make them."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return ()
    return BotoCoreError, ClientError


def _read_selections(config: RunConfig) -> list[tuple[str | None, str | None]]:
    """Return the channels that stages read with their conditions; None is ``data.uri`` alone."""
    if config.data.synthetic_samples:
        return []
    default = config.data.where
    found: dict[tuple[str | None, str | None], None] = {}
    for stage in config.stages:
        for source in config.sources_of(stage):
            found[source.channel, source.where or default] = None
        if not config.sources_of(stage):
            found[None, default] = None
    return list(found)


def latents_of(header: IndexHeader) -> int:
    """Return the resolution of the latents in the shards, in pixels; 0 without latents."""
    return (header.options.get("latents") or {}).get("resolution") or 0


def _is_alone(config: RunConfig) -> bool:
    """Return whether every stage reads ``data.uri`` alone, which the index describes."""
    return not config.data.synthetic_samples and not any(map(config.sources_of, config.stages))


def _with(config: RunConfig, samples: int | None, latents: int) -> RunConfig:
    facts = {"latents": latents} | ({} if samples is None else {"samples": samples})
    return config.model_copy(update={"data": config.data.model_copy(update=facts)})

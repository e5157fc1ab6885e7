"""Which samples a job skips because they were removed; read at its start and at each epoch.

Each process reads the lists without the others: it replaces a removed sample by another one of the
epoch, so the number of samples and their order stay the same, and ranks need not agree on a moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from sm_train.entrypoints.job_interface.index_location import removal_list
from sm_train.entrypoints.shards.removal_list import RemovalList, decode_list
from sm_train.entrypoints.storage.aws_session import prepare_session
from sm_train.entrypoints.storage.store import ObjectStore, store_of

ShardNames: TypeAlias = list[str] | pa.Array
"""An Arrow array if there may be hundreds of thousands: it takes a tenth of a list's memory."""


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ChannelRemovals:
    """Where the removals of a channel are listed, and the numbers of its shards.

    ``names`` has the shard names by number; a mixture numbers its copies from each of ``firsts``
    on. ``file`` came with the index when the job started. ``address`` is the list itself, which
    may have changed since.
    """

    channel: str
    names: ShardNames
    file: Path | None
    address: str | None
    firsts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class RemovalNotice:
    """What a process knows of a channel's removals; ``problem`` is set if that is incomplete."""

    channel: str
    samples: int
    address: str
    problem: str | None = None

    @property
    def code(self) -> str:
        """The code of the event."""
        return "samples-removed" if self.problem is None else "removals-unknown"

    @property
    def message(self) -> str:
        """One line for the user."""
        listed = f"{self.channel}: {self.samples:,} removed samples of {self.address}"
        if self.problem is not None:
            return f"{listed}; whether there are more is unknown: {self.problem}"
        return f"{listed} are not trained on; others take their places"


@dataclass(eq=False)
class RemovedSamples:
    """The removed samples of all channels; can be pickled before the first use."""

    channels: tuple[ChannelRemovals, ...] = ()
    _keys: dict[str, dict[int, frozenset[str]]] = field(default_factory=dict)
    _epoch: int | None = None

    def contains(self, shard: int, key: str) -> bool:
        """Return whether the sample ``key`` of a shard, given by its number, was removed."""
        return any(key in keys.get(shard, ()) for keys in self._keys.values())

    def enter(self, epoch: int) -> tuple[RemovalNotice, ...]:
        """Read the lists again if an epoch begins; return what they say.

        A list that cannot be read leaves what was known before.
        """
        if epoch == self._epoch or not self.channels:
            return ()
        self._epoch = epoch
        return tuple(notice for channel in self.channels if (notice := self._refresh(channel)))

    def _refresh(self, channel: ChannelRemovals) -> RemovalNotice | None:
        listed, problem = _read(channel, is_first=channel.channel not in self._keys)
        if listed is not None:
            self._keys[channel.channel] = _keys_by_number(channel, listed)
        keys = self._keys.get(channel.channel, {})
        known = sum(map(len, keys.values())) // len(channel.firsts)
        address = channel.address or str(channel.file)
        if problem is None and not known:
            return None
        return RemovalNotice(channel.channel, known, address, problem)


def _read(channel: ChannelRemovals, *, is_first: bool) -> tuple[RemovalList | None, str | None]:
    """Return the newest list that can be read, and why another one could not be."""
    problem = None
    if channel.address is not None:
        try:
            return _read_address(channel.address), None
        except Exception as error:  # whatever botocore raises: training continues without the list
            problem = " ".join(f"{type(error).__name__}: {error}".split())
    elif not is_first:
        return None, None
    if is_first and channel.file is not None:
        return read_list_file(channel.file), problem
    return None, problem


def _read_address(address: str) -> RemovalList:
    """Return the list at a path or an S3 address; an empty one if there is none."""
    if not address.startswith("s3://"):
        return read_list_file(Path(address))
    bucket, _, key = address.removeprefix("s3://").partition("/")
    stored = _open_store().get_if_exists(bucket, key)
    return RemovalList() if stored is None else decode_list(stored.content, address)


@cache
def _open_store() -> ObjectStore:
    """Return S3 with time limits: a job without a route to it must not wait for minutes."""
    import boto3
    from botocore.config import Config

    session = boto3.Session(region_name=os.environ.get("AWS_REGION"))
    prepare_session(session)
    retries: Any = {"mode": "standard", "total_max_attempts": 3}
    return store_of(session, config=Config(connect_timeout=5, read_timeout=30, retries=retries))


def read_list_file(path: Path) -> RemovalList:
    """Return the list at ``path``; an empty one if there is none.

    Raises:
        RemovalListError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        return decode_list(path.read_bytes(), str(path))
    except FileNotFoundError:
        return RemovalList()


def _keys_by_number(channel: ChannelRemovals, listed: RemovalList) -> dict[int, frozenset[str]]:
    names = channel.names
    if isinstance(names, list):  # a file name may be any bytes, an Arrow string is UTF-8
        names = pa.array([name.encode(errors="backslashreplace").decode() for name in names])
    by_shard = listed.keys_by_shard(names)
    numbers = pc.index_in(pa.array(by_shard, pa.string()), value_set=names).to_pylist()
    return {
        first + number: keys
        for number, keys in zip(numbers, by_shard.values(), strict=True)
        for first in channel.firsts
    }


def without_replaced(
    shards: Mapping[str, T], index: Path, indexed: Callable[[], Collection[str]]
) -> dict[str, T]:
    """Return ``shards``, by name, without those that `sm-train remove` replaces or has replaced.

    It leaves both a shard and its successor for a while; one of them is among the names that
    ``indexed`` returns of the index. They are read only if a removal is unfinished.

    Raises:
        RemovalListError: the list of removed samples is damaged.
    """
    unfinished = read_list_file(Path(removal_list(str(index)))).unfinished
    if not unfinished:
        return dict(shards)
    replaced = unfinished.difference(indexed())
    return {name: value for name, value in shards.items() if name not in replaced}


def channel_removals(
    channel: str, names: ShardNames, index: Path | None, address: str | None
) -> tuple[ChannelRemovals, ...]:
    """Return where the removals of a channel of shards are listed; nothing if nowhere."""
    file = None if index is None else Path(removal_list(str(index)))
    if file is None and address is None:
        return ()
    return (ChannelRemovals(channel, names, file, address),)


def mix_removals(
    channels: tuple[ChannelRemovals, ...], firsts: tuple[int, ...]
) -> tuple[ChannelRemovals, ...]:
    """Return the removals of a channel, of which a mixture numbers copies from ``firsts`` on."""
    return tuple(replace(channel, firsts=firsts) for channel in channels)

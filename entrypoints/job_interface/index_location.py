"""Where the index of a set of shards lies, on disk and on S3.

A packed folder holds ``shards/`` and, next to it, ``index.parquet``. The index of any other folder
``NAME`` lies next to it as ``NAME.index.parquet``, so that each folder has an index of its own. The
index never lies among the shards: with ``ShardedByS3Key`` every object below the data channel's
prefix is assigned to one instance, so any other file among the tars would take a shard's place.

This module has no dependencies, because ``estimators`` imports it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

INDEX_NAME = "index.parquet"
INDEX_CHANNEL = "index"
SHARDS_FOLDER = "shards"
"""Name of the folder that ``sm-train pack`` writes shards to."""
_LIST_VARIABLE = "SM_TRAIN_REMOVALS_"
"""Begins the names of a job's environment variables that say where removed samples are listed."""

_LIST_SUFFIX = ".removed"

_VARIABLE_LENGTH = 512
"""Longest value of a variable of a training job (CreateTrainingJob, Environment)."""
STREAM_STATE = ".streaming"
"""Folder next to it with the state of a streaming pack, whose images arrive one by one."""

STAGED_FOLDER, RECORDS_FOLDER = f"{STREAM_STATE}/staged", f"{STREAM_STATE}/records"
"""Folders of images that are in no shard yet, and of numbers of shards that are in no index yet."""

_STREAMED = re.compile(r"streamed-(\d{6,})\.tar")
_REWRITTEN = re.compile(r"streamed-\d{6,}-r\d+\.tar")


def index_channel(channel: str) -> str:
    """Return the name of the channel with the index of a channel of shards."""
    return INDEX_CHANNEL if channel == "train" else f"{INDEX_CHANNEL}_{channel}"


def find_index(folder: Path) -> Path | None:
    """Return the index in the folder of an index channel, if there is one."""
    return next(iter(sorted(folder.rglob("*.parquet"))), None)


def index_name(shards: str) -> str:
    """Return the file name of the index of a folder or prefix whose last part is ``shards``."""
    return INDEX_NAME if shards == SHARDS_FOLDER else f"{shards}.{INDEX_NAME}"


def indexed_folder(index: str) -> str:
    """Return the last part of the folder or prefix whose index has this file name."""
    return SHARDS_FOLDER if index == INDEX_NAME else index.removesuffix(f".{INDEX_NAME}")


def index_path(shards: Path) -> Path:
    """Return where the index of the local folder ``shards`` lies."""
    if shards.name in ("", ".."):
        shards = shards.resolve()
    return shards.with_name(index_name(shards.name))


def removal_list(index: str) -> str:
    """Return where the list of removed samples lies, next to the index at a path or URI.

    Its name starts with that of the index, so a channel with the index holds it, too.
    """
    return f"{index}{_LIST_SUFFIX}"


def index_listing(index: str) -> str:
    """Return where the versions of indexed shards lie, by which `sm-train index` knows new ones."""
    return f"{index}.listing"


def replaced_index(index: str) -> str:
    """Return where the index of shards lies that were rewritten without removed samples."""
    return f"{index}.replaced"


def indexed_by(removals: str) -> str:
    """Return the path or URI of the index that a list of removed samples lies next to."""
    return removals.removesuffix(_LIST_SUFFIX)


def removal_variables(lists: Mapping[str, str]) -> dict[str, str]:
    """Return a job's environment variables with the path or URI of each channel's list.

    The lists need not exist. One whose address is too long is known from the channel of its index
    alone, as it is when the job starts.
    """
    values = [f"{channel}={address}" for channel, address in lists.items()]
    return {
        f"{_LIST_VARIABLE}{number}": value
        for number, value in enumerate(values)
        if len(value) <= _VARIABLE_LENGTH
    }


def removal_addresses(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what :func:`removal_variables` put into ``environment``."""
    values = (value for name, value in environment.items() if name.startswith(_LIST_VARIABLE))
    pairs = (value.partition("=") for value in values)
    return {channel: address for channel, _, address in pairs if channel}


def removal_list_uri(shards_uri: str) -> str | None:
    """Return where the list of samples removed from an S3 prefix lies; None for a whole bucket."""
    index = index_uri(shards_uri)
    return None if index is None else removal_list(index)


def stream_uri(shards_uri: str, folder: str = STREAM_STATE) -> str:
    """Return the S3 prefix of a folder of the state of a streaming pack at ``shards_uri``."""
    bucket, _, prefix = shards_uri.removeprefix("s3://").partition("/")
    parent = prefix.rstrip("/").rpartition("/")[0]
    return f"s3://{bucket}/{f'{parent}/' if parent else ''}{folder}/"


def streamed_shard(number: int) -> str:
    """Return the name of the shard of a streaming pack with this number."""
    return f"streamed-{number:06d}.tar"


def is_streamed(name: str) -> bool:
    """Return whether a streaming pack has written the shard: the index may not have it yet."""
    return _STREAMED.fullmatch(name) is not None


def holds_streamed(name: str) -> bool:
    """Return whether a shard has images that arrived, also one that a removal has rewritten."""
    return is_streamed(name) or _REWRITTEN.fullmatch(name) is not None


def index_uri(shards_uri: str) -> str | None:
    """Return where the index of the S3 prefix ``shards_uri`` lies.

    None if the prefix is a whole bucket: nothing lies next to it.
    """
    parent, _, name = shards_uri.rstrip("/").rpartition("/")
    return f"{parent}/{index_name(name)}" if parent.count("/") > 1 else None


def shard_of_key(key: str) -> int | None:
    """Return the number of the streamed shard that a sample with this key was sealed into."""
    found = re.fullmatch(r"s(\d{6,})-\d{6,}", key)
    return None if found is None else int(found[1])

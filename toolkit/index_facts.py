"""What the index says of a run's training data: how many samples, and latents of which resolution.

An index next to the shards in S3 describes what a job reads. One next to ``data.local`` describes
what should be the same shards; it only stands in for what the run file does not state.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.common.index_location import index_path

if TYPE_CHECKING:
    import boto3
    from sm_train.entrypoints.data.shard_index import IndexHeader
    from sm_train.estimators.config.schema import RunConfig


def with_local_index(config: RunConfig, base: Path) -> RunConfig:
    """Return ``config`` with what the index of ``data.local`` says and the run file does not.

    ``base`` is the run file's folder. An index that is missing or damaged changes nothing.
    """
    data = config.data
    if data.local is None or not _is_alone(config):
        return config
    header = _read_local_header(index_path(base / data.local))
    if header is None:
        return config
    return _with(config, data.samples or header.samples, data.latents or latents_of(header))


def with_index_file(config: RunConfig, path: Path) -> RunConfig:
    """Return ``config`` with what the index at ``path`` says; unchanged if it cannot be read."""
    header = _read_local_header(path)
    return config if header is None else _with(config, header.samples, latents_of(header))


def _read_local_header(path: Path) -> IndexHeader | None:
    if not path.is_file():
        return None
    from sm_train.entrypoints.data.shard_format import ShardError
    from sm_train.entrypoints.data.shard_index import read_header

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
    from sm_train.entrypoints.data.shard_format import ShardError

    with suppress(BotoCoreError, ClientError, OSError, ShardError):
        header = read_stored_header(session, config.index_uri)
        return _with(config, header.samples, latents_of(header))
    return config


def read_stored_header(session: boto3.Session, uri: str) -> IndexHeader:
    """Read the header of an index in S3, in two or three small requests.

    Raises:
        ClientError: S3 rejects a request.
        FileNotFoundError: there is no such object.
        ShardError: it is not an index, is damaged, or has another version.
    """
    from sm_train.entrypoints.data.shard_index import read_header
    from sm_train.entrypoints.object_store.object_file import open_object
    from sm_train.entrypoints.object_store.store import store_of

    return read_header(open_object(store_of(session), uri), uri)


def latents_of(header: IndexHeader) -> int | None:
    """Return the resolution of the latents in the shards, in pixels; None without latents."""
    resolution: int | None = (header.options.get("latents") or {}).get("resolution")
    return resolution


def _is_alone(config: RunConfig) -> bool:
    """Return whether every stage reads ``data.uri`` alone, which the index describes."""
    return not config.data.synthetic_samples and not any(map(config.sources_of, config.stages))


def _with(config: RunConfig, samples: int, latents: int | None) -> RunConfig:
    facts: dict[str, int | None] = {"samples": samples, "latents": latents}
    if config.data.where is not None:
        del facts["samples"]  # how many it selects is not in the header
    return config.model_copy(update={"data": config.data.model_copy(update=facts)})

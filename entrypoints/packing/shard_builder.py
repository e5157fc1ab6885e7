"""Makes one shard of a plan: reads its inputs, rejects what is bad, writes the rest in order.

Threads read and examine inputs ahead of the writer: file reads, digests and decoders all leave
Python's lock. What they return is taken in order, so the shard does not depend on their number.
A shard that was made leaves a small record, its own index; one without a record is made again,
byte for byte.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.common.index_location import SHARDS_FOLDER
from sm_train.entrypoints.data.aspect_buckets import aspect_shapes, nearest_shape
from sm_train.entrypoints.data.buffer_pool import ReadBufferPool
from sm_train.entrypoints.data.image_header import DecodeError
from sm_train.entrypoints.data.shard_format import MOMENTS, POOLED, TEXT, Shard, ShardError
from sm_train.entrypoints.data.shard_index import IndexWriter, RejectedInput, ShardIndex
from sm_train.entrypoints.packing.image_metadata import ImageMetadata, read_image_metadata, reencode
from sm_train.entrypoints.packing.plan import PackInput, PackOptions, ShardPlan, sample_key
from sm_train.entrypoints.packing.shard_writer import ShardFile, sample_parts
from sm_train.entrypoints.packing.storage import BytesLike, S3Access, Storage, read_uri

if TYPE_CHECKING:
    from sm_train.entrypoints.packing.latent_encoder import LatentEncoder

WORK = ".packing"
"""Folder of the records of an unfinished pack, in the destination."""

MAX_BYTES = 1 << 30
"""Larger images are rejected unread: several are in memory at a time."""

GROUP, GROUP_BYTES = 32, 4 * 2**20
"""Inputs, or their bytes, that a thread looks at before it takes the next: every hand-over costs
some time, and what is in flight is held in memory."""

AHEAD = 3
"""Groups in flight for each thread: enough to keep it busy while the writer waits for one."""

BUCKET_RESOLUTION = 1024
"""Of the aspect bucket in a sample's facts, as SDXL's report names them."""

ProgressCallback = Callable[[int, int, int], None]
"""Hears of inputs that are done: how many, their packed bytes, and how many were rejected."""


class StoppedError(Exception):
    """Somebody asked this process to stop."""


@dataclass(frozen=True)
class BuiltShard:
    """A shard that is there, or None where nothing was left for it; and what was rejected."""

    shard: Shard | None
    rejected: tuple[RejectedInput, ...]


@dataclass(frozen=True)
class _Accepted:
    key: str
    parts: list[BytesLike]
    facts: ImageMetadata


def build_shard(
    plan: ShardPlan,
    destination: Storage,
    access: S3Access,
    threads: int,
    tell: ProgressCallback,
    dropped: Mapping[int, RejectedInput],
) -> None:
    """Make the shard and its record in ``destination``; ``dropped`` inputs are left out.

    Raises:
        OSError: the destination cannot be written.
    """
    rejected: list[RejectedInput] = []
    accepted = _accepted(plan, access, threads, tell, dropped, rejected)
    first = next(accepted, None)
    shard = None
    if first is not None:
        name = f"{SHARDS_FOLDER}/{plan.name}"
        with destination.atomic_writer(name) as sink:
            shard = _write(ShardFile(sink, plan.name), chain([first], accepted))
    with destination.atomic_writer(record_name(plan)) as sink:
        sink.write(encode_record(shard, rejected))


def record_name(plan: ShardPlan) -> str:
    """Where a shard's record lies below the destination."""
    return f"{WORK}/{plan.name}.parquet"


def read_record(plan: ShardPlan, destination: Storage) -> BuiltShard | None:
    """What was made of a shard; None where that is not finished, or is not there any more."""
    try:
        content = destination.read(record_name(plan))
        index = open_index(content)
    except (FileNotFoundError, ShardError):
        return None
    rejected = tuple(index.rejected())
    if not len(index):
        return BuiltShard(None, rejected)
    shard = index.shard(0)
    if destination.size(f"{SHARDS_FOLDER}/{shard.name}") != shard.bytes:
        return None
    return BuiltShard(shard, rejected)


def open_index(content: bytes) -> ShardIndex:
    """An index that is held in memory.

    Raises:
        ShardError: it is none.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.parquet"
        path.write_bytes(content)
        return ShardIndex(path)


def encode_record(shard: Shard | None, rejected: Iterable[RejectedInput] = ()) -> bytes:
    """What is kept of a shard that was made: an index of its own."""
    content = io.BytesIO()
    with IndexWriter(content) as writer:
        if shard is not None:
            writer.add(shard)
        for one in rejected:
            writer.reject(one)
    return content.getvalue()


def _write(file: ShardFile, samples: Iterator[_Accepted]) -> Shard:
    widths: list[int] = []
    heights: list[int] = []
    with file:
        for one in samples:
            file.append(one.key, *one.parts)
            widths.append(one.facts.width)
            heights.append(one.facts.height)
        return file.finish(widths, heights)


def _accepted(
    plan: ShardPlan,
    access: S3Access,
    threads: int,
    tell: ProgressCallback,
    dropped: Mapping[int, RejectedInput],
    rejected: list[RejectedInput],
) -> Iterator[_Accepted]:
    """The samples of the shard, in order; the rest goes to ``rejected``."""
    for outcome in _in_order(plan, access, threads, dropped):
        if isinstance(outcome, RejectedInput):
            rejected.append(outcome)
            tell(1, 0, 1)
        else:
            tell(1, sum(map(len, outcome.parts)), 0)
            yield outcome


def _in_order(
    plan: ShardPlan, access: S3Access, threads: int, dropped: Mapping[int, RejectedInput]
) -> Iterator[_Accepted | RejectedInput]:
    def look(group: Sequence[PackInput]) -> list[_Accepted | RejectedInput]:
        return [_outcome(one, plan.options, access, dropped.get(one.number)) for one in group]

    pending: deque[Future[list[_Accepted | RejectedInput]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for group in _groups(plan.inputs):
                pending.append(pool.submit(look, group))
                if len(pending) >= threads * AHEAD:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            for one in pending:
                one.cancel()


def _groups(inputs: Iterable[PackInput]) -> Iterator[list[PackInput]]:
    group: list[PackInput] = []
    size = 0
    for one in inputs:
        group.append(one)
        size += one.bytes
        if len(group) >= GROUP or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _outcome(
    item: PackInput, options: PackOptions, access: S3Access, drop: RejectedInput | None
) -> _Accepted | RejectedInput:
    """What becomes of an input. Never raises for what is wrong with it."""
    return drop or _try(item, sample_key(item.number), options, access)


def encode_input(
    item: PackInput, key: str, options: PackOptions, access: S3Access
) -> bytes | RejectedInput:
    """One input as a sample called ``key``, as it stands in a tar."""
    outcome = _try(item, key, options, access)
    return outcome if isinstance(outcome, RejectedInput) else b"".join(outcome.parts)


def _try(
    item: PackInput, key: str, options: PackOptions, access: S3Access
) -> _Accepted | RejectedInput:
    try:
        return _accept(item, key, options, access)
    except DecodeError as error:
        return RejectedInput(item.source, error.reason, str(error).partition(": ")[2])


def _accept(item: PackInput, key: str, options: PackOptions, access: S3Access) -> _Accepted:
    content, facts = read_metadata(item, options, access)
    caption = _caption(item, access)
    more = _latents(options, content, caption)
    parts = sample_parts(key, content, caption, facts.kind, _facts(item, facts, caption), more)
    return _Accepted(key, parts, facts)


def _latents(options: PackOptions, content: BytesLike, caption: str) -> dict[str, bytes]:
    """The arrays that are asked for, by their extensions."""
    if options.latents is None or options.latents_resolution is None:
        return {}
    encoder = _encoder(options.latents, options.latents_resolution)
    return dict(zip((MOMENTS, TEXT, POOLED), encoder.arrays(content, caption), strict=False))


_loading = threading.Lock()


def _encoder(folder: str, resolution: int) -> LatentEncoder:
    """One for each process: its threads share the weights."""
    with _loading:
        return _load_encoder(folder, resolution)


@lru_cache(maxsize=1)
def _load_encoder(folder: str, resolution: int) -> LatentEncoder:
    from sm_train.entrypoints.packing.latent_encoder import LatentEncoder

    return LatentEncoder(Path(folder), resolution)


def read_metadata(
    item: PackInput, options: PackOptions, access: S3Access
) -> tuple[BytesLike, ImageMetadata]:
    """An input's image as it is packed, and its facts.

    Raises:
        DecodeError: it is missing, damaged, or filtered out.
    """
    content = _read("image", item.address, item.bytes, access)
    facts = read_image_metadata(content, pixels=options.pixels)
    _filter(facts, options)
    if options.quality is None and (
        options.max_side is None or max(facts.width, facts.height) <= options.max_side
    ):
        return content, facts
    content = reencode(content, options.max_side, options.quality or 95)
    return content, read_image_metadata(content, pixels=options.pixels)


def _filter(facts: ImageMetadata, options: PackOptions) -> None:
    short, long = sorted((facts.width, facts.height))
    if options.min_side is not None and short < options.min_side:
        raise DecodeError("image-small", f"{facts.width} × {facts.height} pixels")
    if options.max_aspect is not None and long > options.max_aspect * short:
        raise DecodeError("image-long", f"{facts.width} × {facts.height} pixels")


def _facts(item: PackInput, facts: ImageMetadata, caption: str) -> bytes:
    document = {
        "width": facts.width,
        "height": facts.height,
        "orientation": facts.orientation,
        "format": facts.kind,
        "sha256": facts.sha256,
        "phash": None if facts.phash is None else f"{facts.phash:016x}",
        "aspect_bucket": _bucket(facts.width, facts.height),
        "caption_length": len(caption),
        "source": item.source,
    }
    return json.dumps(document).encode()


@lru_cache(maxsize=4096)
def _bucket(width: int, height: int) -> str:
    shapes = aspect_shapes(BUCKET_RESOLUTION)
    chosen_height, chosen_width = shapes[int(nearest_shape(shapes, height, width))]
    return f"{chosen_width}x{chosen_height}"


def _caption(item: PackInput, access: S3Access) -> str:
    """The caption without the white space and the byte order mark around it."""
    raw = b""
    if item.caption is None:
        if item.caption_address is None:
            raise DecodeError("caption-missing", f"no caption beside {item.source}")
        raw = bytes(_read("caption", item.caption_address, 0, access))
    try:
        if item.caption is not None:
            raw = item.caption.encode("utf-8", "surrogateescape")  # the table's own bytes again
        caption = raw.decode("utf-8-sig").strip()
    except UnicodeError:
        raise DecodeError("caption-not-utf8", "the caption is not UTF-8 text") from None
    if not caption:
        raise DecodeError("caption-empty", "nothing but white space")
    return caption


def _read(part: str, address: str, size: int, access: S3Access) -> BytesLike:
    _require_bytes(part, size)
    name = address.rpartition("/")[2]
    try:
        if address.startswith("s3://"):
            return read_uri(address, access)
        return _read_file(part, address)
    except DecodeError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: a zero byte in the name, which no file has.
        raise DecodeError(f"{part}-missing", f"no file {name}") from None
    except OSError as error:
        if address.startswith("s3://") and not isinstance(error, PermissionError):
            raise  # it may be there the next time: left out, it would be left out for good
        raise DecodeError(f"{part}-unreadable", error.strerror or str(error)) from None


_room = ReadBufferPool()


def _read_file(part: str, address: str) -> BytesLike:
    """By the system's own calls: a file object costs more than they do."""
    descriptor = os.open(address, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            name = address.rpartition("/")[2]
            raise DecodeError(f"{part}-unreadable", f"{name} is not a regular file")
        _require_bytes(part, found.st_size)
        room = _room.take(found.st_size)
        read = 0
        while read < len(room) and (more := os.readv(descriptor, [room[read:]])):
            read += more
        return room[:read]
    finally:
        os.close(descriptor)


def _require_bytes(part: str, size: int) -> None:
    if size > MAX_BYTES:
        raise DecodeError(f"{part}-too-large", f"{size} bytes; 1 GiB at most")

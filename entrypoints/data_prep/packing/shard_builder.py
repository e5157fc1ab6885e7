"""Builds one shard of a plan: reads its inputs, rejects the bad ones, writes the others in order.

Threads read and check inputs ahead of the writer; file reads, digests and decoders all release the
GIL. Their results are consumed in order, so the shard does not depend on the number of threads. A
finished shard has a small record, an index of its own. A shard without a record is built again,
with the same bytes.
"""

from __future__ import annotations

import io
import json
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sm_train.entrypoints.data_loading.sample_ranges import aspect_shapes, nearest_shape
from sm_train.entrypoints.data_prep.packing.embedded_images import (
    file_of,
    is_embedded,
    read_embedded,
)
from sm_train.entrypoints.data_prep.packing.image_metadata import ImageMetadata, read_image_metadata
from sm_train.entrypoints.data_prep.packing.plan import (
    PackInput,
    PackOptions,
    ShardPlan,
    sample_key,
)
from sm_train.entrypoints.data_prep.packing.reencode import (
    DEFAULT_QUALITY,
    is_convertible,
    measure,
    reencode,
)
from sm_train.entrypoints.data_prep.work.work_stages import STATE_FOLDER
from sm_train.entrypoints.data_prep.work.worker_pool import ProgressCallback
from sm_train.entrypoints.images.buffer_pool import ReadBufferPool
from sm_train.entrypoints.images.decoder_pool import Decoders, InProcessDecoders
from sm_train.entrypoints.images.image_header import DecodeError, primary_color_codes
from sm_train.entrypoints.job_interface.index_location import SHARDS_FOLDER
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.entrypoints.sample_metadata.column_types import SOURCE, ColumnTypes, as_type
from sm_train.entrypoints.shards.shard_format import Shard, ShardError
from sm_train.entrypoints.shards.shard_index import IndexWriter, RejectedInput, ShardIndex
from sm_train.entrypoints.shards.shard_writer import ShardWriter, sample_parts
from sm_train.entrypoints.storage.storage import Storage, read_uri, write_file
from sm_train.entrypoints.storage.store import S3Access
from sm_train.entrypoints.storage.stream_upload import BytesLike

if TYPE_CHECKING:
    from sm_train.entrypoints.data_prep.packing.latent_encoder import LatentEncoder

MAX_BYTES = 1 << 30
"""Larger images are rejected without reading them: several are in memory at a time."""

GROUP_INPUTS, GROUP_BYTES = 32, 4 * 2**20
"""Limits of one task of a thread. Larger tasks mean fewer hand-overs, smaller ones less memory."""

GROUPS_PER_THREAD = 3
"""Groups in flight: enough to keep a thread busy while the writer waits for another group."""

BUCKET_RESOLUTION = 1024
"""Resolution of the aspect bucket in a sample's metadata, as in SDXL's report."""

_Check = Callable[[BytesLike], ImageMetadata]
"""Decodes an image and returns its metadata."""


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard and its rejected inputs; ``shard`` is None if all inputs were rejected.

    ``options`` are those of the record's header.
    """

    shard: Shard | None
    rejected: tuple[RejectedInput, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InputReader:
    """How inputs are reached in S3, and what decodes them."""

    access: S3Access
    decoders: Decoders


@dataclass(frozen=True)
class _Sample:
    key: str
    buffers: list[BytesLike]
    metadata: ImageMetadata
    columns: tuple[Any, ...]


def build_shard(
    plan: ShardPlan,
    destination: Storage,
    reader: InputReader,
    threads: int,
    on_progress: ProgressCallback,
    dropped: Mapping[int, RejectedInput],
) -> None:
    """Write the shard and then its record to ``destination``, without the ``dropped`` inputs.

    Raises:
        OSError: the destination cannot be written.
    """
    rejected: list[RejectedInput] = []
    accepted = _accepted_samples(plan, reader, threads, on_progress, dropped, rejected)
    first = next(accepted, None)
    shard = None
    if first is not None:
        name = f"{SHARDS_FOLDER}/{plan.name}"
        with destination.atomic_writer(name) as sink:
            shard = _write_samples(
                ShardWriter(sink, plan.name), chain([first], accepted), plan.options.index_columns
            )
    record = encode_record(shard, rejected, plan.options.index_columns)
    write_file(destination, record_name(plan.name), record)


def record_name(shard: str) -> str:
    """Return the name of a shard's record in the destination."""
    return f"{STATE_FOLDER}/{shard}.parquet"


def read_record(shard_name: str, destination: Storage) -> BuiltShard | None:
    """Return a finished shard; None if it is unfinished, damaged, or no longer exists."""
    try:
        index = read_index(destination, record_name(shard_name))
        rejected = tuple(index.rejected())
        shard = index.shard(0) if len(index) else None
    except (FileNotFoundError, ShardError):
        return None
    if shard is not None and destination.size(f"{SHARDS_FOLDER}/{shard.name}") != shard.bytes:
        return None
    return BuiltShard(shard, rejected, index.header.options)


def read_index(destination: Storage, name: str) -> ShardIndex:
    """Return the index that is a small file of a destination.

    Raises:
        FileNotFoundError: there is none.
        ShardError: it is damaged; the message names its address.
    """
    return open_index(destination.read(name), destination.address(name))


def open_index(content: bytes, address: str) -> ShardIndex:
    """Return the index whose file content is ``content``.

    Raises:
        ShardError: it is not an index; the message names its ``address``.
    """
    return ShardIndex(address, cast("io.RawIOBase", io.BytesIO(content)))


def encode_record(
    shard: Shard | None,
    rejected: Iterable[RejectedInput] = (),
    columns: ColumnTypes | None = None,
    options: dict[str, Any] | None = None,
) -> bytes:
    """Return the record of a finished shard, which is an index of this shard alone."""
    content = io.BytesIO()
    with IndexWriter(content, columns=columns, options=options) as writer:
        if shard is not None:
            writer.add(shard)
        for item in rejected:
            writer.reject(item)
    return content.getvalue()


def _write_samples(writer: ShardWriter, samples: Iterator[_Sample], columns: ColumnTypes) -> Shard:
    widths: list[int] = []
    heights: list[int] = []
    colors: list[str | None] = []
    values: dict[str, list[Any]] = {name: [] for name in columns}
    with writer:
        for sample in samples:
            writer.append(sample.key, *sample.buffers)
            widths.append(sample.metadata.width)
            heights.append(sample.metadata.height)
            colors.append(sample.metadata.color.code)
            for column, value in zip(values.values(), sample.columns, strict=True):
                column.append(value)
        return writer.finish(widths, heights, colors, values)


def _accepted_samples(
    plan: ShardPlan,
    reader: InputReader,
    threads: int,
    on_progress: ProgressCallback,
    dropped: Mapping[int, RejectedInput],
    rejected: list[RejectedInput],
) -> Iterator[_Sample]:
    """Yield the shard's samples in order; append rejected inputs to ``rejected``."""
    for result in _prepare_inputs(plan, reader, threads, dropped):
        if isinstance(result, RejectedInput):
            rejected.append(result)
            on_progress(1, 0, 1)
        else:
            on_progress(1, sum(map(len, result.buffers)), 0)
            yield result


def _prepare_inputs(
    plan: ShardPlan, reader: InputReader, threads: int, dropped: Mapping[int, RejectedInput]
) -> Iterator[_Sample | RejectedInput]:
    """Prepare the inputs in parallel and yield the results in order."""

    def prepare_group(group: Sequence[PackInput]) -> list[_Sample | RejectedInput]:
        return [
            dropped.get(item.number)
            or _prepare(item, sample_key(item.number), plan.options, reader)
            for item in group
        ]

    # The queue is bounded, so results do not accumulate behind a slow disk.
    pending: deque[Future[list[_Sample | RejectedInput]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for group in _groups(plan.inputs):
                pending.append(pool.submit(prepare_group, group))
                if len(pending) >= threads * GROUPS_PER_THREAD:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _groups(inputs: Iterable[PackInput]) -> Iterator[list[PackInput]]:
    group: list[PackInput] = []
    size = 0
    for item in inputs:
        group.append(item)
        size += item.bytes
        if len(group) >= GROUP_INPUTS or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_input(
    item: PackInput, key: str, options: PackOptions, reader: InputReader
) -> bytes | RejectedInput:
    """Return one input as the tar members of a sample with the key ``key``."""
    result = _prepare(item, key, options, reader)
    return result if isinstance(result, RejectedInput) else b"".join(result.buffers)


def _prepare(
    item: PackInput, key: str, options: PackOptions, reader: InputReader
) -> _Sample | RejectedInput:
    """Return one input as a sample, or why it is rejected."""
    try:
        return _make_sample(item, key, options, reader)
    except DecodeError as error:
        return RejectedInput(item.source, error.reason, error.detail)


def _make_sample(item: PackInput, key: str, options: PackOptions, reader: InputReader) -> _Sample:
    content, metadata = read_metadata(item, options, reader)
    caption = read_caption(item, reader.access)
    document = _metadata_document(item, metadata, caption)
    latents = _encode_latents(options, content, caption, reader.decoders)
    encoded = json.dumps(document).encode()
    buffers = sample_parts(key, content, caption, metadata.format, encoded, latents)
    columns = tuple(
        as_type(column_value(document, name), kind) for name, kind in options.index_columns.items()
    )
    return _Sample(key, buffers, metadata, columns)


def column_value(document: Mapping[str, Any], name: str) -> Any:
    """Return a sample's value of a column that the index keeps, from its JSON file.

    ``source`` is that of the image, unless the table has such a column.
    """
    columns = document.get("columns", {})
    return document["source"] if name == SOURCE and SOURCE not in columns else columns.get(name)


def _encode_latents(
    options: PackOptions, content: BytesLike, caption: str, decoders: Decoders
) -> dict[str, bytes]:
    """Return the requested ``.npy`` arrays by their file extensions."""
    if options.latents is None or options.latents_resolution is None:
        return {}
    encoder = _encoder(options.latents, options.latents_resolution, options.color)
    return encoder.encode(content, caption, decoders)


_load_lock = threading.Lock()


def _encoder(folder: str, resolution: int, color: ColorPolicy) -> LatentEncoder:
    """Return this process's encoder, whose weights its threads share."""
    with _load_lock:
        return _load_encoder(folder, resolution, color)


@lru_cache(maxsize=1)
def _load_encoder(folder: str, resolution: int, color: ColorPolicy) -> LatentEncoder:
    from sm_train.entrypoints.data_prep.packing.latent_encoder import LatentEncoder

    return LatentEncoder(Path(folder), resolution, color)


def read_metadata(
    item: PackInput, options: PackOptions, reader: InputReader, *, colors: bool = False
) -> tuple[BytesLike, ImageMetadata]:
    """Return an input's image as it will be packed, and its metadata, on request with its colors.

    Raises:
        DecodeError: it is missing, corrupt, or filtered out.
    """
    content = read_input("image", item.address, item.bytes, reader.access)
    check = partial(read_image_metadata, policy=options.color, pixels=options.pixels, colors=colors)
    if options.convert and is_convertible(content):
        return _convert(content, options, reader.decoders, check)
    decoders = reader.decoders if options.pixels else InProcessDecoders()  # headers need no decoder
    metadata = decoders.call(check, content)
    _apply_filters(metadata.height, metadata.width, options)
    if options.quality is None and (
        options.max_side is None or max(metadata.width, metadata.height) <= options.max_side
    ):
        return content, metadata
    encoded, found = _reencode(content, options, reader.decoders, check)
    return encoded, _with_transfer(found, metadata.color.transfer)


def _with_transfer(metadata: ImageMetadata, transfer: int | None) -> ImageMetadata:
    """Return metadata that say which HDR levels a JPEG has kept, which it cannot state itself."""
    if transfer is None or metadata.color.hdr is not None:
        return metadata
    return replace(metadata, color=replace(metadata.color, transfer=transfer))


def _convert(
    content: BytesLike, options: PackOptions, decoders: Decoders, check: _Check
) -> tuple[BytesLike, ImageMetadata]:
    """Return an image of another format as JPEG, at its full size unless it is filtered out."""
    full_size = decoders.call(measure, content)
    _apply_filters(*full_size, options)
    _, transfer = primary_color_codes(content) or (None, None)
    encoded, metadata = _reencode(content, options, decoders, check)
    return encoded, _with_transfer(metadata, transfer)


def _reencode(
    content: BytesLike, options: PackOptions, decoders: Decoders, check: _Check
) -> tuple[BytesLike, ImageMetadata]:
    quality = options.quality or DEFAULT_QUALITY
    encode = partial(reencode, max_side=options.max_side, quality=quality, policy=options.color)
    encoded = decoders.call(encode, content)
    return encoded, decoders.call(check, encoded)


def _apply_filters(height: int, width: int, options: PackOptions) -> None:
    short, long = sorted((width, height))
    size = f"{width} × {height} pixels"
    if options.min_side is not None and short < options.min_side:
        raise DecodeError("image-small", size)
    if options.max_aspect is not None and long > options.max_aspect * short:
        raise DecodeError("image-long", size)


def _metadata_document(item: PackInput, metadata: ImageMetadata, caption: str) -> dict[str, Any]:
    """Return the content of a sample's JSON file."""
    return {
        "width": metadata.width,
        "height": metadata.height,
        "orientation": metadata.orientation,
        "format": metadata.format,
        "sha256": metadata.sha256,
        "phash": None if metadata.phash is None else f"{metadata.phash:016x}",
        "aspect_bucket": _aspect_bucket(metadata.width, metadata.height),
        "caption_length": len(caption),
        "source": item.source,
        **({} if item.table_fields is None else json.loads(item.table_fields)),
    }


@lru_cache(maxsize=4096)
def _aspect_bucket(width: int, height: int) -> str:
    shapes = aspect_shapes(BUCKET_RESOLUTION)
    bucket_height, bucket_width = shapes[int(nearest_shape(shapes, height, width))]
    return f"{bucket_width}x{bucket_height}"


def read_caption(item: PackInput, access: S3Access) -> str:
    """Return the caption without surrounding white space and without a byte order mark.

    Raises:
        DecodeError: there is none, it is blank, or it is not UTF-8.
    """
    raw = b""
    if item.caption is None:
        if item.caption_address is None:
            raise DecodeError("caption-missing", f"no caption for {item.source}")
        raw = bytes(read_input("caption", item.caption_address, 0, access))
    try:
        if item.caption is not None:
            raw = item.caption.encode("utf-8", "surrogateescape")  # the bytes of the table
        caption = raw.decode("utf-8-sig").strip()
    except UnicodeError:
        raise DecodeError("caption-not-utf8", "the caption is not UTF-8 text") from None
    if not caption:
        raise DecodeError("caption-empty", "only white space")
    return caption


def read_input(part: str, address: str, size: int, access: S3Access) -> BytesLike:
    """Return the content of an input's ``part``, its image or caption, of about ``size`` bytes.

    Raises:
        DecodeError: it is missing, too large or unreadable.
        OSError: S3 failed.
    """
    _require_size(part, size)
    name = address.rpartition("/")[2]
    try:
        if is_embedded(address):
            return read_embedded(address, access)
        if address.startswith("s3://"):
            return read_uri(address, access)
        return _read_file(part, address)
    except DecodeError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: the name contains a zero byte, which no file name can.
        raise DecodeError(f"{part}-missing", f"no file {name}") from None
    except OSError as error:
        if file_of(address).startswith("s3://") and not isinstance(error, PermissionError):
            raise  # perhaps transient: a rejected input would stay out of the finished pack
        raise DecodeError(f"{part}-unreadable", error.strerror or str(error)) from None


_read_buffers = ReadBufferPool()


def _read_file(part: str, address: str) -> BytesLike:
    """Read a file by system calls, as a file object costs more than the calls."""
    descriptor = os.open(address, os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO would block
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            name = address.rpartition("/")[2]
            raise DecodeError(f"{part}-unreadable", f"{name} is not a regular file")
        _require_size(part, status.st_size)
        buffer = _read_buffers.take(status.st_size)
        filled = 0
        while filled < len(buffer) and (count := os.readv(descriptor, [buffer[filled:]])):
            filled += count
        return buffer[:filled]
    finally:
        os.close(descriptor)


def _require_size(part: str, size: int) -> None:
    if size > MAX_BYTES:
        raise DecodeError(f"{part}-too-large", f"{size} bytes; 1 GiB at most")

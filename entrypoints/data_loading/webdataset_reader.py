"""Streams samples with the webdataset package: without an index and without synchronization.

Each GPU draws shards at random from those that its node sees, by a seed of its own, and shuffles
their samples in a buffer. The first sample is available after the first bytes of a shard. Samples
repeat before others were read, and a resumed run does not continue exactly; the
:mod:`~sm_train.entrypoints.data_loading.indexed_reader` does.

The design follows BRIA's training on SageMaker (AWS Machine Learning Blog, "How BRIA AI used
distributed training in Amazon SageMaker", 2024): no synchronization between the data loaders of
instances, and a fixed seed per GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, compress, count, islice
from pathlib import Path
from typing import Any, ClassVar

from sm_train.entrypoints.base.pip_install import install_command
from sm_train.entrypoints.base.rng import hash64, random_below
from sm_train.entrypoints.data_loading.batches import RawBatch, RawSample, SampleMembers
from sm_train.entrypoints.data_loading.indexed_shards import IndexedShards, read_indexed_shards
from sm_train.entrypoints.data_loading.sample_ranges import cumulative_weights
from sm_train.entrypoints.data_loading.sampler import DataPosition, EpochSize
from sm_train.entrypoints.data_loading.shard_catalog import (
    AllGather,
    DataRank,
    ListedShards,
    missing_index,
    raise_on_all_ranks,
)
from sm_train.entrypoints.data_loading.shard_reader import BadSample, Submit
from sm_train.entrypoints.job_interface.index_location import is_streamed
from sm_train.entrypoints.job_interface.job_config import DataConfig, DataSource
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.entrypoints.shards.removal_list import RemovalListError
from sm_train.entrypoints.shards.removed_samples import (
    ChannelRemovals,
    mix_removals,
    without_replaced,
)
from sm_train.entrypoints.shards.shard_format import END_MARK, DataError, ShardError, find_shards
from sm_train.entrypoints.shards.tar_reader import (
    COMPRESSED_FAULT,
    FileBytes,
    is_compressed,
    is_skipped,
    split_name,
)

STREAMS = 8
"""Shards that a GPU reads at the same time, which hides the latency of requests."""

_CHUNK_SAMPLES = 16
"""Samples that a thread takes from a stream at a time; another chunk is read meanwhile.

The first chunks are smaller, so that the first batch does not wait for more than it needs.
"""

_MAX_FAILURES = 64
"""Errors without a sample in between, after which a stream gives up."""

_SOURCE_KEY = 1
"""Purpose of the random numbers that choose a source."""

_PIPE = "pipe:"
"""Begins the URL of a command."""


@dataclass(frozen=True, eq=False)
class ShardStream:
    """The shards that this node sees: number → path, and number → name below the channel.

    All nodes number the shards of all nodes alike, ``count`` in total. ``digest`` identifies their
    names. ``options`` are empty: what the shards were packed with is in the index. A mixture has
    the first shard of each of its ``sources``; there are none without one. ``selected`` finds the
    samples to read of those shards of which not all are read. ``all_names`` are the names of all
    shards by number, and ``removals`` say where the removed samples of each source are listed;
    ``listed`` has the shards of each source.
    """

    paths: dict[int, Path]
    names: dict[int, str]
    count: int
    digest: str
    options: dict[str, Any] = field(default_factory=dict)
    sources: tuple[tuple[int, DataSource], ...] = ()
    selected: dict[int, SelectedKeys] = field(default_factory=dict)
    all_names: list[str] = field(default_factory=list)
    removals: tuple[ChannelRemovals, ...] = ()
    listed: tuple[ListedShards, ...] = ()
    digest_covers: ClassVar[str] = "names of the shards"
    """What two data sets with equal digests have in common."""


@dataclass(frozen=True)
class SelectedKeys:
    """Finds the keys of the selected samples of one of the shards of an index."""

    shards: IndexedShards
    number: int

    def __call__(self) -> frozenset[str]:
        source, row = self.shards.place(self.number)
        is_selected = self.shards.selected(self.number)
        assert is_selected is not None  # by a condition
        return frozenset(compress(source.index.keys(row), is_selected))


def list_stream(
    channel: Path,
    rank: DataRank,
    all_gather: AllGather,
    index: Path | None = None,
    where: str | None = None,
) -> ShardStream:
    """List the shards of ``channel``; a collective call. No shard is opened.

    ``where`` is the condition of the samples to read, on columns of the ``index``.

    Raises:
        DataError: a node sees no shard, or the condition selects nothing; raised on all ranks.
    """
    visible = find_shards(channel)
    selected: dict[str, SelectedKeys] = {}
    if where is not None or index is not None:
        visible, selected, problem = _selected(visible, index, where)
        raise_on_all_ranks(all_gather, problem)
    listings = all_gather((rank.node_rank, sorted(visible) if rank.local_rank == 0 else None))
    names: set[str] = set()
    for node, listed in listings:
        if listed is None:
            continue
        if not listed:
            raise DataError(f"{channel}: {rank.hosts[node]} sees no .tar file")
        names.update(listed)
    numbers = {name: number for number, name in enumerate(sorted(names))}
    selections = {keys.shards.selection_digest or "" for keys in islice(selected.values(), 1)}
    identity = "\n".join([*numbers, *selections])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    paths = {numbers[name]: path for name, path in visible.items()}
    own = {numbers[name]: name for name in visible}
    return ShardStream(
        paths,
        own,
        len(numbers),
        digest,
        selected={numbers[name]: keys for name, keys in selected.items()},
        all_names=list(numbers),
    )


def _selected(
    visible: dict[str, Path], index: Path | None, where: str | None
) -> tuple[dict[str, Path], dict[str, SelectedKeys], str | None]:
    """Return the visible shards that count, and the selected samples of each by name.

    The last is why there are none; None without a problem.
    """
    if index is None:
        return {}, {}, missing_index(index)
    try:
        shards = read_indexed_shards(index, where)
        names: list[str] = shards.names.to_pylist()
        visible = without_replaced(visible, index, lambda: names)
    except (OSError, ShardError, ConditionError, RemovalListError) as error:
        return {}, {}, str(error)
    if where is None:
        return visible, {}, None
    numbers = {name: number for number, name in enumerate(names) if name in visible}
    visible = {
        name: path for name, path in visible.items() if name in numbers or not is_streamed(name)
    }
    if unknown := visible.keys() - numbers.keys():
        return {}, {}, f"data.where: {min(unknown)} is not in the index; run `sm-train index`"
    if not shards.sizes[list(numbers.values())].any():
        return {}, {}, f"data.where: no sample of this node's {len(numbers)} shards fulfils {where}"
    selected = {name: SelectedKeys(shards, number) for name, number in numbers.items()}
    return visible, selected, None


def mix_streams(streams: Sequence[ShardStream], sources: Sequence[DataSource]) -> ShardStream:
    """Return a mixture of ``sources``, which have these streams.

    Without ``sources`` it is the only one of ``streams``.
    """
    if not sources:
        [only] = streams
        return only
    firsts = [0, *accumulate(stream.count for stream in streams)]
    numbered = list(zip(streams, firsts, strict=False))
    digests = repr([stream.digest for stream in streams])
    return ShardStream(
        {
            first + number: path
            for stream, first in numbered
            for number, path in stream.paths.items()
        },
        {
            first + number: name
            for stream, first in numbered
            for number, name in stream.names.items()
        },
        firsts[-1],
        hashlib.sha256(digests.encode()).hexdigest()[:16],
        sources=tuple(zip(firsts, sources, strict=False)),
        selected={
            first + number: keys
            for stream, first in numbered
            for number, keys in stream.selected.items()
        },
        listed=tuple(listed for stream in streams for listed in stream.listed),
        removals=tuple(
            removals
            for stream, first in numbered
            for removals in mix_removals(stream.removals, (first,))
        ),
    )


class WebDatasetReader:
    """Reads random samples of a :class:`ShardStream`.

    ``data.epoch_samples`` of the run file are an epoch; it only numbers them.
    """

    def __init__(
        self,
        shards: ShardStream,
        rank: DataRank,
        config: DataConfig,
        *,
        batch_size: int,
        seed: int,
        state: bytes | None,
    ) -> None:
        """Prepare to read batches of ``batch_size`` samples; ``state`` is that of a checkpoint.

        Raises:
            DataError: ``state`` is of another reader.
        """
        assert config.epoch_samples is not None  # the run file is validated
        world_size = rank.num_nodes * rank.local_world_size
        self._global_batch = batch_size * world_size
        self._steps = max(1, config.epoch_samples // self._global_batch)
        self._batch_size, self._seed, self._world_size = batch_size, seed, world_size
        self._rank = rank.node_rank * rank.local_world_size + rank.local_rank
        self._first = 0 if state is None else _samples_read(state) // self._global_batch
        self.position = DataPosition(*divmod(self._first, self._steps))
        self._shuffle_buffer = config.shuffle_buffer
        self._selected = shards.selected
        self._names = {
            number: f"{channel}/{name}" if (channel := _channel(shards, number)) else name
            for number, name in shards.names.items()
        }
        sources = shards.sources or ((0, DataSource("train", 1.0, config.pipe)),)
        self._weights = cumulative_weights([source.weight for _, source in sources])
        ends = [*(first for first, _ in sources[1:]), shards.count]
        self._urls = [
            {
                _url(shards.paths[number], shards.names[number], source.pipe): number
                for number in range(first, end)
                if number in shards.paths and _has_samples(shards.selected.get(number))
            }
            for (first, source), end in zip(sources, ends, strict=True)
        ]
        self.resume_warning: str | None = None
        self.resume_code = "data-not-exact"
        if state is not None:
            self.resume_warning = (
                "data.reader: webdataset does not resume exactly: it draws other samples from here "
                "on than an uninterrupted run"
            )
        self.order_note: str | None = (
            "data.reader: webdataset draws the samples of each GPU at random"
        )

    def batches(self, read: Submit) -> Iterator[RawBatch]:
        """Yield batches without end, from as many streams as there are shards, up to a limit."""
        samples = self._mix([self._source(number, read) for number in range(len(self._urls))])
        for number in count(self._first):
            # Another sample may have the same key, and the same sample returns.
            epoch = number * self._world_size + self._rank
            yield RawBatch(
                epoch,
                list(islice(samples, self._batch_size)),
                shape=0,
                position=DataPosition(*divmod(number + 1, self._steps)),
                num_repeated=0,
                replacement=lambda row, attempt: next(samples),
            )

    def _mix(self, sources: list[Iterator[RawSample]]) -> Iterator[RawSample]:
        """Yield samples of the sources by weight; the choice depends on seed and sample only."""
        if len(sources) == 1:
            yield from sources[0]
        for number in count(self._first * self._batch_size):
            uniform = random_below(2**53, self._seed, self._rank, number, _SOURCE_KEY) / 2**53
            yield next(sources[bisect_right(self._weights, uniform, hi=len(sources) - 1)])

    def _source(self, source: int, read: Submit) -> Iterator[RawSample]:
        """Yield the samples of a source without end, of several shards at a time."""
        urls = self._urls[source]
        streams = min(STREAMS, len(urls))
        buffer = max(1, self._shuffle_buffer // (streams * len(self._urls)))
        return _interleave(
            [
                # A signed 63-bit number suits all generators. The streams of GPUs, and those after
                # a resume, differ.
                _samples(
                    urls,
                    self._names,
                    int(hash64(self._seed, self._rank, self._first, number, source)) >> 1,
                    buffer,
                    self._selected,
                )
                for number in range(streams)
            ],
            read,
        )

    def shard_name(self, shard: int) -> str:
        """Return a shard's file name."""
        return self._names[shard]

    def epoch_size(self, epoch: int) -> EpochSize:
        """Return the size of an epoch: as many whole batches as ``data.epoch_samples`` make."""
        return EpochSize(self._steps * self._global_batch, self._steps, None, None)

    def state_at(self, position: DataPosition) -> bytes:
        """Return the number of samples that all ranks have read, as JSON."""
        batches = position.epoch * self._steps + position.step
        document = {"reader": "webdataset", "samples": batches * self._global_batch}
        return json.dumps(document).encode()


def _samples_read(state: bytes) -> int:
    """Parse what :meth:`WebDatasetReader.state_at` wrote.

    Raises:
        DataError: another reader wrote it.
    """
    try:
        samples: int = json.loads(state)["samples"]
    except ValueError:
        raise DataError(
            "data.reader: the checkpoint was written with `indexed`; set it again, or give the run "
            "another name"
        ) from None
    return samples


def is_stream_state(state: bytes) -> bool:
    """Return whether :meth:`WebDatasetReader.state_at` wrote ``state``."""
    return state.startswith(b"{")


def _channel(shards: ShardStream, number: int) -> str:
    """Return the channel of a mixture's shard; empty without a mixture."""
    firsts = [first for first, _ in shards.sources]
    return shards.sources[bisect_right(firsts, number) - 1][1].channel if firsts else ""


def _url(path: Path, name: str, pipe: str | None) -> str:
    """Return what webdataset opens: the path, or the command of ``data.pipe`` for this shard."""
    if pipe is None:
        return str(path.absolute())
    for placeholder, value in (("{path}", str(path)), ("{name}", name)):
        pipe = pipe.replace(placeholder, shlex.quote(value))
    return f"{_PIPE}{pipe}"


def _has_samples(selected: SelectedKeys | None) -> bool:
    return selected is None or bool(selected.shards.sizes[selected.number])


def _samples(
    urls: dict[str, int],
    names: dict[int, str],
    seed: int,
    buffer: int,
    selected: Mapping[int, SelectedKeys],
) -> Iterator[RawSample]:
    """Yield the samples of one stream without end, and what could not be read of it.

    Of a shard in ``selected`` these are the selected samples.

    Raises:
        DataError: nothing can be read, or webdataset is not installed.
    """
    try:
        import webdataset
    except ImportError:
        raise DataError(
            f"data.reader: webdataset is not installed; run: {install_command('train')}"
        ) from None
    errors = _ReadErrors(urls, names)
    # A stream reads one shard at a time.
    keys = lru_cache(maxsize=1)(lambda shard: selected[shard]())

    def is_selected(sample: dict[str, Any]) -> bool:
        shard = urls[sample["__url__"]]
        return shard not in selected or sample["__key__"] in keys(shard)

    pipeline = webdataset.DataPipeline(
        webdataset.ResampledShards(
            list(urls), seed=seed, deterministic=True, worker_seed=lambda: 0
        ),
        errors.watch,
        *_sample_stages(errors.handle),
        errors.found,
        *([webdataset.select(is_selected)] if selected else []),
        webdataset.shuffle(buffer, initial=1, seed=seed),
    )
    for sample in pipeline:
        yield from errors.taken()
        key = sample["__key__"]
        members = {
            name: memoryview(content)
            for name, content in sample.items()
            if not name.startswith("__")
        }
        identity = hashlib.blake2b(key.encode(), digest_size=8).digest()
        yield RawSample(
            urls[sample["__url__"]],
            int.from_bytes(identity, "little") >> 1,
            SampleMembers(key, members),
        )
    yield from errors.taken()


def _sample_stages(handle: Callable[[Exception], bool]) -> list[Callable[..., Any]]:
    """Return the stages that make samples of shards: those of webdataset, without what is skipped.

    webdataset 1.0.2 skips names that begin with a dot at the top only; in a folder, they become
    samples that tear the files around them. It raises an error for a file that a sample has twice.
    """
    from webdataset import tariterators

    return [
        partial(tariterators.url_opener, handler=handle),
        partial(
            tariterators.tar_file_expander,
            handler=handle,
            select_files=lambda name: not is_skipped(name),
        ),
        _without_repeats,
        partial(tariterators.group_by_keys, handler=handle),
    ]


def _without_repeats(files: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pass files on, of those that a sample has twice the first; an empty one ends a shard."""
    current, seen = "", set[str]()
    for file in files:
        if file:
            key, extension = split_name(file["fname"])
            if key != current:
                current, seen = key, set()
            if extension in seen:
                continue
            seen.add(extension)
        else:
            current = ""
        yield file


class _ReadErrors:
    """What a stream could not read: webdataset continues, and training skips and counts it."""

    def __init__(self, urls: dict[str, int], names: dict[int, str]) -> None:
        self._urls, self._names = urls, names
        self._shard = 0
        self._errors: list[RawSample] = []
        self._without_sample: set[int] = set()

    def watch(self, shards: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
        """Pass shards on; an error that follows is one of the last shard.

        A tar that was cut short between two members ends without an error, so look at its end.

        Raises:
            DataError: every shard has been read, without an error, since the last sample.
        """
        for shard in shards:
            if len(self._without_sample) == len(self._urls):
                raise DataError(
                    f"no sample in any of {len(self._urls):,} shards, such as "
                    f"{self._names[self._shard]}; `sm-train index` says what they hold"
                )
            self._shard = self._urls[shard["url"]]
            self._without_sample.add(self._shard)
            if shard["url"].startswith(_PIPE):
                yield shard
                continue
            path = Path(shard["url"])
            if _is_compressed(path):
                self.handle(tarfile.ReadError(COMPRESSED_FAULT))
                continue
            if _is_cut_short(path):
                self.handle(tarfile.ReadError("unexpected end of data"))
            yield shard

    def handle(self, error: Exception) -> bool:
        """Record an error; webdataset's interface of handlers: return True to continue.

        Raises:
            DataError: many errors followed each other without a sample.
        """
        if isinstance(error, DataError):
            raise error
        bad = BadSample(self._names[self._shard], "", _reason(error), _describe(error))
        self._errors.append(RawSample(self._shard, 0, bad))
        # It may hold samples, and has a limit of its own.
        self._without_sample.discard(self._shard)
        if len(self._errors) > _MAX_FAILURES:
            raise DataError(
                f"{bad.shard}: {bad.reason}: {bad.detail}; no sample could be read after "
                f"{_MAX_FAILURES} such errors"
            )
        return True

    def found(self, samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Pass samples on: their shards have some."""
        for sample in samples:
            self._without_sample.clear()
            yield sample

    def taken(self) -> list[RawSample]:
        """Return the errors since the last call."""
        errors, self._errors = self._errors, []
        return errors


def _is_compressed(path: Path) -> bool:
    """Return whether a shard is compressed; False if it cannot be opened."""
    try:
        with path.open("rb", buffering=0) as file:
            return is_compressed(FileBytes(file.fileno()))
    except OSError:
        return False


def _is_cut_short(path: Path) -> bool:
    """Return whether a tar lacks its end mark; False if it cannot be opened."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(END_MARK)))
            return file.read(len(END_MARK)) != END_MARK
    except OSError:
        return False


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "shard-missing"
    if isinstance(error, tarfile.TarError):
        return "tar-damaged"
    return "read-error" if isinstance(error, OSError) else "sample-invalid"


def _describe(error: Exception) -> str:
    """Return one line; webdataset appends its own objects to the arguments of exceptions."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error.args[0]) if error.args else type(error).__name__
    return " ".join(text.partition(" @ ")[0].split())


def _interleave(streams: list[Iterator[RawSample]], read: Submit) -> Iterator[RawSample]:
    """Yield a chunk of each stream in turn, while threads read the following chunks.

    The order does not depend on how fast the threads are.
    """

    def take(stream: Iterator[RawSample], samples: int) -> list[RawSample]:
        return list(islice(stream, samples))

    size = 1
    pending: list[Future[list[RawSample]]] = [read(take, stream, size) for stream in streams]
    while True:
        size = min(2 * size, _CHUNK_SAMPLES)
        for number, stream in enumerate(streams):
            samples = pending[number].result()
            pending[number] = read(take, stream, size)
            yield from samples

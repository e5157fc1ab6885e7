"""Packs images and captions into shards: whole, deterministic, or not at all.

Worker processes check the images, one writer takes their results in the order of the inputs.
Samples are numbered over the accepted inputs in sorted order, so the same input and options give
the same bytes whatever the number of workers. In memory are the list of inputs (with captions,
where a table has them) and a few images for each worker, never a shard.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from sm_train.entrypoints.shard_index import (
    INDEX_NAME,
    SHARDS_FOLDER,
    Refused,
    ShardIndex,
    write_index,
)
from sm_train.entrypoints.shard_writer import Sample, ShardWriter, encode_sample, sample_key
from sm_train.entrypoints.shards import Shard, ShardError
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.packing_images import examine
from sm_train.toolkit.packing_inputs import Input, Inputs, find_inputs
from sm_train.toolkit.packing_staging import publish, signals_as_interrupt, staging_folder

MIN_SHARD_BYTES = 1000

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGT", start=1)}

AHEAD = 4
"""Inputs in flight for each worker: enough to keep it busy while the writer waits for one."""


@dataclass(frozen=True)
class PackJob:
    """What to pack and how; sizes are bytes."""

    source: Path
    destination: Path
    captions: Path | None
    shard_bytes: int
    image_column: str
    caption_column: str
    workers: int


@dataclass(frozen=True)
class Tally:
    """How far a run is; ``bytes`` counts the accepted samples as they stand in the shards."""

    done: int
    total: int
    bytes: int
    refused: int


@dataclass(frozen=True)
class Packed:
    """A finished pack, written now or found done."""

    index: ShardIndex
    destination: Path
    was_there: bool

    @property
    def index_path(self) -> Path:
        return self.destination / INDEX_NAME

    @property
    def shards_path(self) -> Path:
        return self.destination / SHARDS_FOLDER

    @property
    def refused_by_reason(self) -> dict[str, int]:
        """Reason → count, the most frequent first."""
        return dict(Counter(item.reason for item in self.index.refused()).most_common())


def parse_size(text: str) -> int:
    """``500MB``, ``2GB``, ``1.5GiB`` or plain bytes, as bytes.

    Raises:
        UserError: anything else, or less than 1 KB.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?)B?", text.strip().upper(), re.ASCII)
    size = int(Fraction(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size < MIN_SHARD_BYTES:
        raise UserError(
            f"--shard-size: {text!r}: write a size such as 500MB, 2GB or 1.5GiB, at least 1KB"
        )
    return size


def pack(job: PackJob, on_progress: Callable[[Tally], None]) -> Packed:
    """Pack ``job.source`` into ``job.destination``.

    Everything is written to a folder inside the destination, on the same file system, and moved
    in place when it is whole; an error or a signal leaves the destination as it was. Where the
    same inputs were packed with the same options before, nothing is written.

    Raises:
        UserError: nothing to pack, or the destination holds something else.
        OSError: the destination cannot be written, or the disk is full.
        KeyboardInterrupt: by Ctrl-C, SIGTERM or SIGHUP.
    """
    started = time.time_ns()
    inputs = find_inputs(
        job.source,
        job.captions,
        image_column=job.image_column,
        caption_column=job.caption_column,
    )
    if (done := _already_packed(job, inputs)) is not None:
        return Packed(done, job.destination, was_there=True)
    with signals_as_interrupt(), staging_folder(job.destination) as staging:
        shards, refused = _fill(job, inputs, staging, on_progress)
        if not shards:
            raise UserError(_all_refused(job.source, refused))
        write_index(
            staging / INDEX_NAME, shards, refused,
            target_bytes=job.shard_bytes, inputs=inputs.fingerprint,
        )  # fmt: skip
        # The index's time says up to when changes to the inputs are in it.
        os.utime(staging / INDEX_NAME, ns=(started, started))
        publish(staging, job.destination)
    return Packed(ShardIndex(job.destination / INDEX_NAME), job.destination, was_there=False)


def _fill(
    job: PackJob, inputs: Inputs, staging: Path, on_progress: Callable[[Tally], None]
) -> tuple[list[Shard], list[Refused]]:
    """Write the shards into ``staging``; returns them and what was left out."""
    refused = list(inputs.refused)
    total = len(inputs.images) + len(refused)
    accepted = written = 0
    folder = staging / SHARDS_FOLDER
    folder.mkdir()
    with (
        ShardWriter(folder, job.shard_bytes) as writer,
        closing(examined(inputs.images, job.workers)) as outcomes,
    ):
        for outcome in outcomes:
            if isinstance(outcome, Refused):
                refused.append(outcome)
            else:
                key = sample_key(accepted)
                encoded = encode_sample(key, outcome)
                writer.write(key, encoded)
                accepted += 1
                written += len(encoded)
            on_progress(Tally(accepted + len(refused), total, written, len(refused)))
    refused.sort(key=lambda item: (item.source, item.reason, item.detail))
    return writer.shards, refused


def _all_refused(source: Path, refused: list[Refused]) -> str:
    counts = Counter(item.reason for item in refused).most_common()
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts)
    return f"{source}: nothing to pack, all {len(refused)} inputs are refused: {reasons}"


def examined(images: tuple[Input, ...], workers: int) -> Generator[Sample | Refused]:
    """What becomes of each input, in order; ``workers`` processes look at them."""
    workers = min(workers, len(images))
    if workers <= 1:
        yield from map(examine, images)
        return
    # spawn: a fork would copy this process's threads' locks and its signal handlers.
    with _deaf_children():
        pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=_end_with_parent
        )
    pending: deque[Future[Sample | Refused]] = deque()
    try:
        for image in images:
            with _deaf_children():  # the pool starts its processes as it needs them
                pending.append(pool.submit(examine, image))
            if len(pending) >= workers * AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a process that checks images was killed, perhaps for its memory; try fewer --workers",
            ExitCode.UNEXPECTED,
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Whatever process is started in here does not hear Ctrl-C and hang-up.

    A terminal sends both to the whole group, and only the parent shall answer.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Leave no orphan behind a parent that is killed outright."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _already_packed(job: PackJob, inputs: Inputs) -> ShardIndex | None:
    """The index of a finished pack of these very inputs; None where nothing was packed.

    Raises:
        UserError: the destination holds another pack, or only parts of one.
    """
    path, shards = job.destination / INDEX_NAME, job.destination / SHARDS_FOLDER
    mend = "choose another folder or remove it"
    if not path.exists():
        if not shards.exists() or (shards.is_dir() and not any(shards.iterdir())):
            return None
        raise UserError(f"{shards}: exists, without an index beside it; {mend}")
    try:
        index = ShardIndex(path)
    except ShardError as error:
        raise UserError(f"{error}; {mend}") from None
    if (index.header.inputs, index.header.target_bytes) != (inputs.fingerprint, job.shard_bytes):
        raise UserError(f"{job.destination}: holds a pack of other inputs or options; {mend}")
    if inputs.newest_ns > path.stat().st_mtime_ns:
        raise UserError(f"{job.destination}: {job.source} has changed since it was packed; {mend}")
    for name, size in zip(index.names, index.bytes, strict=True):
        file = shards / name
        if not file.is_file() or file.stat().st_size != size:
            raise UserError(f"{file}: is not as {INDEX_NAME} says; {mend}")
    return index

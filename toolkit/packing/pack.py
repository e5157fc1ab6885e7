"""Packs images and captions into shards: planned at first, then made shard by shard.

The plan is a pure function of the list of inputs and the options, and a shard of its inputs: so
the result is the same whatever the number of processes, and a pack that was broken off goes on
with the shards that are missing. In memory are the list of inputs (with captions, where a table
has them) and a few images for each thread, never a shard.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.index_location import INDEX_NAME, SHARDS_FOLDER
from sm_train.entrypoints.common.signals import raise_on_signals
from sm_train.entrypoints.data.shard_format import ShardError
from sm_train.entrypoints.data.shard_index import RejectedInput, ShardIndex
from sm_train.entrypoints.models.components import describe_latents
from sm_train.entrypoints.packing.pack import (
    PLAN_NAME,
    PackPlan,
    finish,
    forget,
    make_shards,
    refusals,
)
from sm_train.entrypoints.packing.plan import (
    PackOptions,
    ShardPlan,
    packed_bytes,
    plan_shards,
    shard_count,
    shard_name,
)
from sm_train.entrypoints.packing.shard_builder import open_index, record_name
from sm_train.entrypoints.packing.storage import LocalFolder, S3Access, Storage, open_storage
from sm_train.entrypoints.packing.worker_pool import PackProgress, WorkerKilledError, WorkerPlan
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.packing.inputs import PackInputs, find_inputs
from sm_train.toolkit.packing.lock import locked

MIN_SHARD_BYTES = 1000

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGT", start=1)}


@dataclass(frozen=True)
class PackJob:
    """What to pack and how; sizes are bytes.

    ``source`` and ``destination`` are local paths or ``s3://`` addresses. The number of shards is
    a multiple of ``instances``.
    """

    source: str
    destination: str
    captions: Path | None
    shard_bytes: int
    image_column: str
    caption_column: str
    workers: int
    instances: int = 1
    options: PackOptions = field(default_factory=PackOptions)
    access: S3Access = field(default_factory=S3Access)


@dataclass(frozen=True)
class Packed:
    """A finished pack, written now or found done."""

    index: ShardIndex
    destination: Storage
    was_there: bool

    @property
    def index_path(self) -> str:
        return self.destination.address(INDEX_NAME)

    @property
    def shards_path(self) -> str:
        return self.destination.address(SHARDS_FOLDER)

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


def pack(job: PackJob, on_progress: Callable[[PackProgress], None]) -> Packed:
    """Pack ``job.source`` into ``job.destination``.

    Shards get their names when they are whole, and the index comes last. Whatever ends a run
    before that, the same command goes on with what is missing; the result is the same, byte for
    byte. Where everything was packed before, nothing is written.

    Raises:
        UserError: nothing to pack, or the destination holds something else.
        OSError: the destination cannot be written, or the disk is full.
        KeyboardInterrupt: by Ctrl-C, SIGTERM or SIGHUP.
    """
    started = time.time_ns()
    inputs = list_inputs(job)
    destination = open_storage(job.destination, job.access)
    _require_folder(job.destination, destination)
    planned = plan_pack(job, inputs)
    if (done := already_packed(job, planned, inputs.newest_ns, destination)) is not None:
        if destination.size(PLAN_NAME) is not None:  # ended between the index and the last word
            with raise_on_signals(), locked(destination):
                _conclude(planned, destination, begin(planned, destination, started))
        return Packed(done, destination, was_there=True)
    with raise_on_signals(), locked(destination):
        require_same(job, planned, inputs.newest_ns, destination)
        try:
            started = begin(planned, destination, started)
            make_shards(planned, WorkerPlan(destination, job.access, job.workers), on_progress)
            made = finish(planned, destination)
        except BaseException as error:
            _stop(destination, planned, error)
            raise
        if made is None:
            raise UserError(f"{job.destination}: a finished shard is gone; pack again")
        if not any(one.shard for one in made):
            forget(planned, destination)
            raise UserError(_all_refused(job.source, list(refusals(planned, made))))
        _conclude(planned, destination, started)
    return Packed(_read_index(destination), destination, was_there=False)


def list_inputs(job: PackJob) -> PackInputs:
    """What the job's source names; no image is read."""
    return find_inputs(
        job.source,
        job.captions,
        image_column=job.image_column,
        caption_column=job.caption_column,
        access=job.access,
    )


def _conclude(planned: PackPlan, destination: Storage, started: int) -> None:
    """Remove what a pack is resumed by, now that the index is there."""
    # Its time says up to when changes to the inputs are in it.
    destination.set_modified_ns(INDEX_NAME, started)
    forget(planned, destination)


def _require_folder(address: str, destination: Storage) -> None:
    if isinstance(destination, LocalFolder):
        for one in (destination.path, *destination.path.parents):
            if one.exists() and not one.is_dir():
                raise UserError(f"{address}: {one} is not a folder; choose another")


def plan_pack(job: PackJob, inputs: PackInputs) -> PackPlan:
    """Which inputs go into which shard.

    Raises:
        UserError: there are fewer inputs than instances.
    """
    if len(inputs.images) < job.instances:
        raise UserError(
            f"{job.source}: {len(inputs.images)} images for {job.instances} instances; each needs "
            "a shard of its own"
        )
    sizes = [
        packed_bytes(image.bytes, caption)
        for image, caption in zip(inputs.images, inputs.caption_bytes, strict=True)
    ]
    count = shard_count(sum(sizes), job.shard_bytes, multiple_of=job.instances)
    most = len(sizes) // job.instances * job.instances
    edges = plan_shards(sizes, min(count, most)) if sizes else [(0, 0)]
    plans = tuple(
        ShardPlan(number, shard_name(number), inputs.images[first:behind], job.options)
        for number, (first, behind) in enumerate(edges)
    )
    options = index_options(job)
    return PackPlan(plans, inputs.refused, inputs.fingerprint, job.shard_bytes, options)


def _stop(destination: Storage, planned: PackPlan, error: BaseException) -> None:
    """Keep what is finished, and say so; leave nothing where nothing is.

    Raises:
        UserError: something is kept, and the user interrupted it; or a process was killed.
    """
    kept = any(destination.size(record_name(plan)) is not None for plan in planned.plans)
    if not kept:
        forget(planned, destination)
    goes_on = "; finished shards stay, and the same command goes on" if kept else ""
    if isinstance(error, WorkerKilledError):
        raise UserError(
            "a process that packs was killed, perhaps for its memory; try fewer --workers"
            + goes_on,
            ExitCode.UNEXPECTED,
        ) from None
    if isinstance(error, KeyboardInterrupt) and kept:
        raise UserError(f"interrupted{goes_on}", ExitCode.INTERRUPTED) from None


def require_same(job: PackJob, planned: PackPlan, newest_ns: int, destination: Storage) -> None:
    """Refuse an unfinished pack of something else.

    Raises:
        UserError: there is one in the destination.
    """
    try:
        before: dict[str, Any] = json.loads(destination.read(PLAN_NAME))
    except FileNotFoundError:
        return
    except ValueError:
        before = {}
    mend = "choose another folder or remove it"
    plan = _plan_document(planned)
    if {key: before.get(key) for key in plan} != plan:
        raise UserError(
            f"{job.destination}: holds an unfinished pack of other inputs or options; {mend}"
        )
    if newest_ns > before["started_ns"]:
        raise UserError(
            f"{job.destination}: {job.source} has changed since this pack was begun; {mend}"
        )


def begin(planned: PackPlan, destination: Storage, started: int) -> int:
    """Write down what is packed, if it was not before; returns when it was begun."""
    try:
        before: int = json.loads(destination.read(PLAN_NAME))["started_ns"]
    except FileNotFoundError:
        with destination.atomic_writer(PLAN_NAME) as sink:
            sink.write(json.dumps(_plan_document(planned) | {"started_ns": started}).encode())
        return started
    return before


def _plan_document(planned: PackPlan) -> dict[str, Any]:
    return {
        "inputs": planned.fingerprint,
        "shard_bytes": planned.target_bytes,
        "options": planned.index_options,
    }


def index_options(job: PackJob) -> dict[str, Any]:
    """What the index says of how it was packed, defaults left out."""
    options = job.options.changed() | ({"instances": job.instances} if job.instances > 1 else {})
    folder, resolution = job.options.latents, options.pop("latents_resolution", None)
    if folder is not None and resolution is not None:
        options["latents"] = describe_latents(Path(folder), resolution)
    return options


def _all_refused(source: str, refused: list[RejectedInput]) -> str:
    counts = Counter(item.reason for item in refused).most_common()
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts)
    return f"{source}: nothing to pack, all {len(refused)} inputs are refused: {reasons}"


def _read_index(destination: Storage) -> ShardIndex:
    return open_index(destination.read(INDEX_NAME))


def already_packed(
    job: PackJob, planned: PackPlan, newest_ns: int, destination: Storage
) -> ShardIndex | None:
    """The index of a finished pack of these very inputs; None where it is not finished.

    Raises:
        UserError: the destination holds another pack, or only parts of one.
    """
    mend = "choose another folder or remove it"
    try:
        index = _read_index(destination)
    except FileNotFoundError:
        if destination.has_files(SHARDS_FOLDER) and destination.size(PLAN_NAME) is None:
            shown = destination.address(SHARDS_FOLDER)
            raise UserError(f"{shown}: exists, without an index beside it; {mend}") from None
        return None
    except ShardError as error:
        raise UserError(f"{error}; {mend}") from None
    header = index.header
    if (header.inputs, header.target_bytes, header.options) != (
        planned.fingerprint,
        planned.target_bytes,
        planned.index_options,
    ):
        raise UserError(f"{job.destination}: holds a pack of other inputs or options; {mend}")
    if newest_ns > destination.modified_ns(INDEX_NAME):
        raise UserError(f"{job.destination}: {job.source} has changed since it was packed; {mend}")
    for name, size in zip(index.names, index.bytes.tolist(), strict=True):
        if destination.size(f"{SHARDS_FOLDER}/{name}") != size:
            shown = destination.address(f"{SHARDS_FOLDER}/{name}")
            raise UserError(f"{shown}: is not as {INDEX_NAME} says; {mend}")
    return index

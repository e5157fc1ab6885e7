"""Packs images and captions into shards: plans all shards first, then builds them one by one.

The plan is a pure function of the list of inputs and the options, and a shard is a pure function of
its inputs. So the result does not depend on the number of processes, and an interrupted pack
resumes with the missing shards. Memory holds neither the list of inputs nor a whole shard, but a
few images for each thread.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sm_train.entrypoints.common.index_location import INDEX_NAME, SHARDS_FOLDER
from sm_train.entrypoints.common.signals import raise_on_signals
from sm_train.entrypoints.data.shard_format import ShardError
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.entrypoints.models.components import describe_latents
from sm_train.entrypoints.packing.pack import (
    PackPlan,
    build_shards,
    finalize,
    make_plan,
    remove_plan,
    remove_state,
    store_plan,
)
from sm_train.entrypoints.packing.plan import (
    PackOptions,
    plan_shards,
    shard_count,
)
from sm_train.entrypoints.packing.plan_files import INPUTS, PlannedRejections
from sm_train.entrypoints.packing.shard_builder import open_index, record_name
from sm_train.entrypoints.packing.storage import LocalFolder, S3Access, Storage, open_storage
from sm_train.entrypoints.packing.work_claims import PLAN_NAME, SharedWork
from sm_train.entrypoints.packing.worker_pool import PackProgress, WorkerKilledError, WorkerPlan
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.extras import require_extra
from sm_train.toolkit.packing.file_kinds import SkippedKind
from sm_train.toolkit.packing.inputs import InputSource, PackInputs, find_inputs
from sm_train.toolkit.packing.lock import lock_destination

MIN_SHARD_BYTES = 1000

_CHOOSE_ANOTHER = "choose another folder or remove it"

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGT", start=1)}


@dataclass(frozen=True)
class PackJob:
    """What to pack, where to, and how. Sizes are in bytes.

    ``source`` and ``destination`` are local paths or ``s3://`` URIs. The number of shards is a
    multiple of ``instances``.
    """

    source: str
    destination: str
    captions: Path | None
    shard_bytes: int
    image_column: str
    caption_column: str
    workers: int
    size_column: str | None = None
    where: str | None = None
    instances: int = 1
    options: PackOptions = field(default_factory=PackOptions)
    access: S3Access = field(default_factory=S3Access)


@dataclass(frozen=True, repr=False)
class PackResult:
    """A finished pack; ``up_to_date`` if an earlier command had finished it.

    ``skipped`` are the files of the source that are neither images nor captions, by kind.
    ``filtered`` is the number of rows of a table that do not fulfil its condition.
    """

    index: ShardIndex
    destination: Storage
    up_to_date: bool
    skipped: dict[str, SkippedKind]
    filtered: int = 0

    @property
    def samples(self) -> int:
        """The number of packed images with their captions."""
        return self.index.header.samples

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.index)

    @property
    def bytes(self) -> int:
        """The size of all shards."""
        return self.index.header.bytes

    @property
    def index_path(self) -> str:
        """The path or S3 address of the index."""
        return self.destination.address(INDEX_NAME)

    @property
    def shards_path(self) -> str:
        """The path or S3 address of the folder of shards: the run file's ``data``."""
        return self.destination.address(SHARDS_FOLDER)

    @property
    def rejected_by_reason(self) -> dict[str, int]:
        """Number of rejected inputs for each reason, most frequent first."""
        return dict(Counter(item.reason for item in self.index.rejected()).most_common())

    def __repr__(self) -> str:
        return (
            f"PackResult({self.samples:,} samples in {self.shards:,} shards, "
            f"{sum(self.rejected_by_reason.values()):,} rejected)"
        )


def parse_size(text: str) -> int:
    """Parse ``500MB``, ``2GB``, ``1.5GiB`` or a plain number, in bytes.

    Raises:
        UserError: the text is none of these, or the size is below 1 KB.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?)B?", text.strip().upper(), re.ASCII)
    size = int(Fraction(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size < MIN_SHARD_BYTES:
        raise UserError(
            f"--shard-size: {text!r}: write a size such as 500MB, 2GB or 1.5GiB, at least 1KB"
        )
    return size


def pack(job: PackJob, on_progress: Callable[[PackProgress], None]) -> PackResult:
    """Pack ``job.source`` into ``job.destination``.

    Shards are written atomically, and the index comes last. However a run ends before that, the
    same command resumes it and the result has the same bytes. A finished pack is left unchanged.

    Raises:
        UserError: there is nothing to pack, or the destination holds another pack.
        OSError: the destination cannot be written, or the disk is full.
        KeyboardInterrupt: on Ctrl-C, SIGTERM or SIGHUP.
    """
    started_ns = time.time_ns()
    destination = open_storage(job.destination, job.access)
    with raise_on_signals(), plan_pack(job) as (inputs, plan):
        if inputs.has_heic:
            require_extra("heic", "pillow_heif", purpose="converting HEIC")
        _require_folder(job.destination, destination)
        if (index := find_finished(job, plan, inputs.newest_ns, destination)) is not None:
            if (
                destination.size(PLAN_NAME) is not None
            ):  # interrupted between the index and clean-up
                with lock_destination(destination):
                    _clean_up(plan, destination, started_ns)
            return PackResult(index, destination, True, inputs.skipped, inputs.filtered)
        with lock_destination(destination):
            require_same_plan(job, plan, inputs.newest_ns, destination)
            _build(job, plan, inputs, started_ns, on_progress)
    index = _read_index(destination)
    return PackResult(index, destination, False, inputs.skipped, inputs.filtered)


def _build(
    job: PackJob,
    plan: PackPlan,
    inputs: PackInputs,
    started_ns: int,
    on_progress: Callable[[PackProgress], None],
) -> None:
    """Store the plan, build its shards and write the index."""
    destination = open_storage(job.destination, job.access)
    try:
        plan, started_ns = store_plan(plan, inputs.folder, destination, job.access, started_ns)
        work = WorkerPlan(destination, job.access, job.workers)
        build_shards(plan, work, SharedWork(destination, is_shared=False), on_progress)
        totals = finalize(plan, destination)
    except BaseException as error:
        _handle_interruption(destination, plan, error)
        raise
    if totals is None:
        raise UserError(f"{job.destination}: a finished shard was removed; pack again")
    if not totals.samples:
        remove_plan(plan, destination)
        raise UserError(_nothing_accepted(job.source, totals.rejected))
    _clean_up(plan, destination, started_ns)


@contextmanager
def plan_pack(job: PackJob) -> Iterator[tuple[PackInputs, PackPlan]]:
    """Find the inputs and assign them to shards; their files are removed at the end.

    Raises:
        UserError: there is nothing to pack, or there are fewer inputs than instances.
    """
    source = InputSource(
        job.source,
        job.captions,
        job.image_column,
        job.caption_column,
        job.size_column,
        job.where,
        job.options.convert,
        job.access,
    )
    with TemporaryDirectory(prefix="sm-train-plan-") as folder:
        inputs = find_inputs(source, Path(folder))
        yield inputs, _assign(job, inputs)


def _clean_up(plan: PackPlan, destination: Storage, started_ns: int) -> None:
    """Remove the state of a pack whose index is written."""
    # An input that changed after the start may be packed in its old version: date the index back to
    # the start, so that the next run notices the change.
    destination.set_modified_ns(INDEX_NAME, started_ns)
    remove_state(plan, destination)


def _require_folder(address: str, destination: Storage) -> None:
    if isinstance(destination, LocalFolder):
        for path in (destination.path, *destination.path.parents):
            if path.exists() and not path.is_dir():
                raise UserError(f"{address}: {path} is not a folder; choose another")


def _assign(job: PackJob, inputs: PackInputs) -> PackPlan:
    """Assign the inputs to shards."""
    if inputs.images and inputs.images < job.instances:
        raise UserError(
            f"{job.source}: {inputs.images} images for {job.instances} instances; each needs "
            "at least one shard"
        )
    count = shard_count(inputs.packed_bytes, job.shard_bytes, multiple_of=job.instances)
    max_count = inputs.images // job.instances * job.instances
    counts = [0]
    if inputs.images:
        sizes = inputs.files.read(INPUTS, ["packed_bytes"], 0, inputs.images)
        parts = (batch.column(0).to_numpy() for batch in sizes)
        counts = plan_shards(parts, inputs.packed_bytes, min(count, max_count))
    return PackPlan(
        make_plan(counts, inputs.files, inputs.root, job.options),
        PlannedRejections(inputs.files, inputs.rejected),
        inputs.fingerprint,
        job.shard_bytes,
        index_options(job),
        inputs.image_bytes,
        inputs.root,
    )


def _handle_interruption(destination: Storage, plan: PackPlan, error: BaseException) -> None:
    """Keep finished shards for the next run; without any, remove the state of the pack.

    Raises:
        UserError: the user interrupted a pack with finished shards, or a worker was killed.
    """
    kept = any(destination.size(record_name(shard)) is not None for shard in plan.plans)
    if not kept:
        remove_plan(plan, destination)
    resumable = "; finished shards are kept, run the same command to resume" if kept else ""
    if isinstance(error, WorkerKilledError):
        raise UserError(
            "a worker process was killed, perhaps because it ran out of memory; try fewer --workers"
            + resumable,
            ExitCode.UNEXPECTED,
        ) from None
    if isinstance(error, KeyboardInterrupt) and kept:
        raise UserError(f"interrupted{resumable}", ExitCode.INTERRUPTED) from None


def require_same_plan(job: PackJob, plan: PackPlan, newest_ns: int, destination: Storage) -> None:
    """Require that an unfinished pack in the destination is one of the same inputs and options.

    Raises:
        UserError: it is not.
    """
    try:
        unfinished: dict[str, Any] = json.loads(destination.read(PLAN_NAME))
    except FileNotFoundError:
        return
    except ValueError:
        unfinished = {}
    document = plan.identity
    if {key: unfinished.get(key) for key in document} != document:
        raise UserError(
            f"{job.destination}: contains an unfinished pack of other inputs or options; "
            f"{_CHOOSE_ANOTHER}"
        )
    if newest_ns > unfinished["started_ns"]:
        raise UserError(
            f"{job.destination}: {job.source} has changed since this pack was started; "
            f"{_CHOOSE_ANOTHER}"
        )


def index_options(job: PackJob) -> dict[str, Any]:
    """Return the options that the index records: those that differ from the defaults."""
    options = job.options.non_defaults() | (
        {"instances": job.instances} if job.instances > 1 else {}
    )
    if job.where is not None:
        options["where"] = job.where
    folder, resolution = job.options.latents, options.pop("latents_resolution", None)
    if folder is not None and resolution is not None:
        options["latents"] = describe_latents(Path(folder), resolution)
    return options


def _nothing_accepted(source: str, rejected: Counter[str]) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in rejected.most_common())
    return f"{source}: nothing to pack, all {rejected.total()} inputs were rejected: {reasons}"


def _read_index(destination: Storage) -> ShardIndex:
    return open_index(destination.read(INDEX_NAME))


def find_finished(
    job: PackJob, plan: PackPlan, newest_ns: int, destination: Storage
) -> ShardIndex | None:
    """Return the index of a finished pack of the same inputs; None if it is not finished.

    Raises:
        UserError: the destination contains another pack, or an incomplete one.
    """
    try:
        index = _read_index(destination)
    except FileNotFoundError:
        if destination.has_files(SHARDS_FOLDER) and destination.size(PLAN_NAME) is None:
            shards = destination.address(SHARDS_FOLDER)
            raise UserError(f"{shards}: exists without an index; {_CHOOSE_ANOTHER}") from None
        return None
    except ShardError as error:
        raise UserError(f"{error}; {_CHOOSE_ANOTHER}") from None
    header = index.header
    if (header.inputs, header.target_bytes, header.options) != (
        plan.fingerprint,
        plan.target_bytes,
        plan.index_options,
    ):
        raise UserError(
            f"{job.destination}: contains a pack of other inputs or options; {_CHOOSE_ANOTHER}"
        )
    if newest_ns > destination.modified_ns(INDEX_NAME):
        raise UserError(
            f"{job.destination}: {job.source} has changed since it was packed; {_CHOOSE_ANOTHER}"
        )
    for name, size in zip(index.names, index.bytes.tolist(), strict=True):
        if destination.size(f"{SHARDS_FOLDER}/{name}") != size:
            shard = destination.address(f"{SHARDS_FOLDER}/{name}")
            raise UserError(f"{shard}: differs from {INDEX_NAME}; {_CHOOSE_ANOTHER}")
    return index

"""Packs images and captions into shards: plans all shards first, then builds them one by one.

The plan is a pure function of the list of inputs and the options, and a shard is a pure function of
its inputs. So the result does not depend on the number of processes, and an interrupted pack
resumes with the missing shards. Memory holds neither the list of inputs nor a whole shard, but a
few images for each thread.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sm_train.entrypoints.base.signals import interruption, raise_on_signals
from sm_train.entrypoints.data_prep.indexing.index_plan import INDEX_OPTIONS
from sm_train.entrypoints.data_prep.packing.build_pack import (
    build_shards,
    finalize,
    remove_plan,
    remove_state,
)
from sm_train.entrypoints.data_prep.packing.packed_sources import rows_with_samples
from sm_train.entrypoints.data_prep.packing.plan import (
    DEFAULT_OPTIONS,
    PackOptions,
    plan_shards,
    shard_count,
)
from sm_train.entrypoints.data_prep.packing.plan_files import INPUTS, PlannedRejections
from sm_train.entrypoints.data_prep.packing.shard_builder import read_index, record_name
from sm_train.entrypoints.data_prep.packing.stored_plan import (
    INPUTS_FOLDER,
    PackedInputs,
    PackPlan,
    make_plan,
    read_packed_inputs,
    read_plan,
    read_start,
    remove_incomplete_plan,
    store_plan,
)
from sm_train.entrypoints.data_prep.streaming.staging import arriving_addresses
from sm_train.entrypoints.data_prep.work.plan_documents import read_plan_document
from sm_train.entrypoints.data_prep.work.work_stages import PLAN_NAME, STATE_FOLDER, SharedWork
from sm_train.entrypoints.data_prep.work.worker_pool import (
    WorkerKilledError,
    WorkerPlan,
    WorkProgress,
)
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME, SHARDS_FOLDER
from sm_train.entrypoints.job_interface.job_config import UNRECORDED_COLOR
from sm_train.entrypoints.models.components import describe_latents
from sm_train.entrypoints.sample_metadata.column_types import (
    ENRICHED,
    MADE_CAPTIONS,
    ColumnType,
    common_type,
)
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.shards.shard_index import IndexHeader, ShardIndex, count_rejected
from sm_train.entrypoints.storage.storage import LocalFolder, S3Prefix, Storage, open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.base.extras import require_extra
from sm_train.toolkit.data_prep.packing.append import Comparison
from sm_train.toolkit.data_prep.packing.file_kinds import SkippedKind
from sm_train.toolkit.data_prep.packing.input_sorter import REMOVED
from sm_train.toolkit.data_prep.packing.inputs import InputSource, PackInputs, find_inputs
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet, find_shard_set
from sm_train.toolkit.data_prep.packing.tables import TableOptions
from sm_train.toolkit.data_prep.processing.destination_lock import lock_destination

MIN_SHARD_BYTES = 1000

_CHOOSE_ANOTHER = "choose another folder or remove it"

_OPTION_NAMES = {
    "pixels": "--headers-only",
    "caption_columns": "--caption-column",
    "index_columns": "--index-column",
    "duplicates": "--drop-duplicates",
    "near_bits": "--near-duplicates",
    "instances": "--for",
    "shard_bytes": "--shard-size",
}
"""Options of the command line whose names are not those of the index."""

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGT", start=1)}


@dataclass(frozen=True)
class PackJob:
    """What to pack, where to, and how. Sizes are in bytes.

    ``source`` and ``destination`` are local paths or ``s3://`` URIs. The number of shards is a
    multiple of ``instances``. ``append`` adds the images that a finished pack does not have.
    Images that were removed from a pack in ``removed`` are left out.
    """

    source: str
    destination: str
    captions: str | None
    shard_bytes: int
    workers: int
    table: TableOptions = field(default_factory=TableOptions)
    instances: int = 1
    append: bool = False
    options: PackOptions = DEFAULT_OPTIONS
    access: S3Access = field(default_factory=S3Access)
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Appended:
    """What was added to a pack, and how the other images of the source compare with it."""

    samples: int
    shards: int
    comparison: Comparison


@dataclass(frozen=True, repr=False)
class PackResult:
    """A finished pack; ``up_to_date`` if an earlier command had finished it.

    ``skipped`` are the files of the source that are neither images nor captions, by kind.
    ``filtered`` is the number of rows of a table that do not fulfil its condition. ``appended`` is
    what an append added.
    """

    index: ShardIndex
    destination: Storage
    up_to_date: bool
    skipped: dict[str, SkippedKind]
    filtered: int = 0
    appended: Appended | None = None

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
        return count_rejected(self.index.rejected())

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


def pack(job: PackJob, on_progress: Callable[[WorkProgress], None]) -> PackResult:
    """Pack ``job.source`` into ``job.destination``.

    Shards are written atomically, and the index comes last. However a run ends before that, the
    same command resumes it and the result has the same bytes. A finished pack is left unchanged,
    or extended if ``job.append``.

    Raises:
        UserError: there is nothing to pack, or the destination holds another pack.
        OSError: the destination cannot be written, or the disk is full.
        KeyboardInterrupt: on Ctrl-C, SIGTERM or SIGHUP.
    """
    with raise_on_signals():
        if job.append:
            return _append(job, on_progress)
        return _pack(job, on_progress)


def _pack(job: PackJob, on_progress: Callable[[WorkProgress], None]) -> PackResult:
    started_ns = time.time_ns()
    destination = open_storage(job.destination, job.access)
    with plan_pack(job) as (inputs, plan):
        require_heic(inputs)
        require_folder(job.destination, destination)
        if (index := find_finished(job, plan, inputs.newest_ns, destination)) is not None:
            if destination.size(PLAN_NAME) is not None:
                # Interrupted between the index and clean-up.
                with lock_destination(destination):
                    _clean_up(plan, destination, started_ns)
            return PackResult(index, destination, True, inputs.skipped, inputs.filtered)
        with lock_destination(destination):
            require_same_plan(job, plan, inputs.newest_ns, destination)
            _build(job, plan, started_ns, on_progress, new_inputs=inputs.folder)
    index = _read_index(destination)
    return PackResult(index, destination, False, inputs.skipped, inputs.filtered)


def _append(job: PackJob, on_progress: Callable[[WorkProgress], None]) -> PackResult:
    """Add the images that the pack does not have, in new shards.

    An unfinished append is completed first, with the images that it was started with.
    """
    started_ns = time.time_ns()
    destination = open_storage(job.destination, job.access)
    before = packed = open_finished(job, destination)
    if destination.has_files(STATE_FOLDER):
        with lock_destination(destination):
            remove_stale_state(job, destination)
            if (unfinished := read_unfinished_append(job, packed.index, destination)) is not None:
                _build(job, unfinished, started_ns, on_progress)
        packed = open_finished(job, destination)
    with plan_pack(job, packed) as (inputs, plan):
        if inputs.is_empty:
            return _append_result(before, inputs, destination)
        require_heic(inputs)
        with lock_destination(destination):
            require_not_extended(job, plan, destination)
            _build(job, plan, started_ns, on_progress, new_inputs=inputs.folder)
        return _append_result(before, inputs, destination)


def _append_result(before: FinishedPack, inputs: PackInputs, destination: Storage) -> PackResult:
    index = _read_index(destination)
    assert inputs.comparison is not None
    appended = Appended(
        index.header.samples - before.index.header.samples,
        len(index) - len(before.index),
        inputs.comparison,
    )
    up_to_date = index.header == before.index.header
    return PackResult(index, destination, up_to_date, inputs.skipped, inputs.filtered, appended)


def read_unfinished_append(
    job: PackJob, index: ShardIndex, destination: Storage
) -> PackPlan | None:
    """Return the stored plan of an append that ``index`` does not have; None if there is none."""
    try:
        plan = read_plan(destination, job.access)
    except FileNotFoundError:
        return None
    if plan.fingerprint in index.header.appended:
        return None
    latents = job.options.latents
    return plan if latents is None else plan.with_model(Path(latents))


def remove_stale_state(job: PackJob, destination: Storage) -> None:
    """Remove what a finished pack was resumed from, and a plan that was not stored completely.

    Both remain if a process is killed at the wrong moment. The destination must be locked.
    """
    try:
        plan = read_plan(destination, job.access)
    except FileNotFoundError:
        remove_incomplete_plan(destination)
        return
    header = _read_index(destination).header
    if plan.fingerprint in header.fingerprints:
        remove_state(plan, destination)


def require_not_extended(job: PackJob, plan: PackPlan, destination: Storage) -> None:
    """Require that the pack in the destination is still the one that ``plan`` extends.

    Raises:
        UserError: another command has extended it.
    """
    header = _read_index(destination).header
    if plan.extends != header.fingerprints:
        raise UserError(f"{job.destination}: another command has added images to it; append again")


def require_heic(inputs: PackInputs) -> None:
    if inputs.has_heic:
        require_extra("heic", "pillow_heif", purpose="converting HEIC")


def _build(
    job: PackJob,
    plan: PackPlan,
    started_ns: int,
    on_progress: Callable[[WorkProgress], None],
    *,
    new_inputs: Path | None = None,
) -> None:
    """Build the shards of a plan and write the index.

    The plan is in the destination, unless its inputs are in the folder ``new_inputs``.
    """
    destination = open_storage(job.destination, job.access)
    try:
        if new_inputs is not None:
            plan, started_ns = store_plan(plan, new_inputs, destination, job.access, started_ns)
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
        raise UserError(nothing_accepted(job.source, totals.rejected))
    _clean_up(plan, destination, started_ns)


@contextmanager
def plan_pack(
    job: PackJob, packed: FinishedPack | None = None, *, preview: bool = False
) -> Iterator[tuple[PackInputs, PackPlan]]:
    """Find the inputs and assign them to shards; their files are removed at the end.

    The plan of an append has the inputs that are not in the pack ``packed``. With ``preview``, the
    inputs have the columns of a table.

    Raises:
        UserError: there is nothing to pack, or there are fewer inputs than instances.
    """
    source = InputSource(
        job.source,
        job.captions,
        job.table,
        job.options.convert,
        job.access,
        _removed_sources(job),
        preview,
    )
    with TemporaryDirectory(prefix="sm-train-plan-") as folder:
        inputs = find_inputs(source, Path(folder), None if packed is None else packed.inputs)
        yield inputs, _assign(job, inputs, packed)


def _removed_sources(job: PackJob) -> frozenset[str]:
    """Return the images that must not be packed.

    Those removed from the destination count for an append, and after it was emptied; so do those
    that an earlier pack of it left out. Packing again what is in it changes nothing.
    """
    destination = open_storage(job.destination, job.access)
    is_indexed = destination.size(INDEX_NAME) is not None
    own = ShardSet(destination, SHARDS_FOLDER, job.access)
    lists = [own.read_list()] if job.append or not is_indexed else []
    left_out = frozenset[str]()
    if job.append and is_indexed:
        with own.open_index() as (index, _):
            rejected = index.rejected()
            left_out = frozenset(item.source for item in rejected if item.reason == REMOVED)
    for address in job.removed:
        shards = find_shard_set(address, job.access)
        lists.append(shards.read_list())
        if shards.storage.size(shards.list_file) is None:
            raise UserError(f"--removed: {address}: no image was removed from it")
    return left_out.union(*(removals.sources for removals in lists))


def _clean_up(plan: PackPlan, destination: Storage, started_ns: int) -> None:
    """Remove the state of a pack whose index is written."""
    # An input that changed after the start may be packed in its old version: date the index back to
    # the start, so that the next run notices the change.
    destination.set_modified_ns(INDEX_NAME, started_ns)
    remove_state(plan, destination)


def require_folder(address: str, destination: Storage) -> None:
    if isinstance(destination, LocalFolder):
        for path in (destination.path, *destination.path.parents):
            if path.exists() and not path.is_dir():
                raise UserError(f"{address}: {path} is not a folder; choose another")


def _index_columns(
    job: PackJob, new: Mapping[str, ColumnType | None], packed: FinishedPack | None
) -> dict[str, ColumnType]:
    """Return the columns of the index, which has the types of a pack that is extended.

    A column without any value holds texts.

    Raises:
        UserError: the new images have values of another type.
    """
    if packed is None:
        return {name: kind or "text" for name, kind in new.items()}
    types = packed.index.header.columns
    for name, kind in new.items():
        if common_type(types[name], kind) != types[name]:
            raise UserError(
                f"--append: the column {name} of {job.source} holds values of the type {kind}, in "
                f"{job.destination} {types[name]}; convert it"
            )
    return types


def _assign(job: PackJob, inputs: PackInputs, packed: FinishedPack | None) -> PackPlan:
    """Assign the inputs to shards."""
    if inputs.images and inputs.images < job.instances:
        new = "" if packed is None else "new "
        raise UserError(
            f"{job.source}: {inputs.images} {new}images for {job.instances} instances; each needs "
            "at least one shard"
        )
    count = shard_count(inputs.packed_bytes, job.shard_bytes, multiple_of=job.instances)
    max_count = inputs.images // job.instances * job.instances
    counts = [0]
    if inputs.images:
        sizes = inputs.files.read(INPUTS, ["packed_bytes"], 0, inputs.images)
        parts = (batch.column(0).to_numpy() for batch in sizes)
        counts = plan_shards(parts, inputs.packed_bytes, min(count, max_count))
    shards, fingerprints = (
        ((), ()) if packed is None else (packed.inputs.shards, packed.inputs.fingerprints)
    )
    columns = _index_columns(job, inputs.index_columns, packed)
    options = replace(job.options, index_columns=columns)
    return PackPlan(
        make_plan(counts, inputs.files, inputs.root, options, inputs.fingerprint, packed=shards),
        PlannedRejections(inputs.files, inputs.rejected),
        inputs.fingerprint,
        job.shard_bytes,
        _recorded_options(job, inputs, packed),
        inputs.image_bytes,
        inputs.root,
        shards,
        fingerprints,
    )


def _recorded_options(
    job: PackJob, inputs: PackInputs, packed: FinishedPack | None
) -> dict[str, Any]:
    """Return the options for the index, with the captions of all its images that a program made."""
    before = {} if packed is None else packed.index.header.options.get(MADE_CAPTIONS, {})
    captions = {
        name: made_by
        for name, made_by in inputs.made_columns.items()
        if name in job.table.caption_columns
    }
    made = before | captions
    return index_options(job) | ({MADE_CAPTIONS: made} if made else {})


def _handle_interruption(destination: Storage, plan: PackPlan, error: BaseException) -> None:
    """Keep finished shards for the next run; without any, remove the state of the pack.

    Raises:
        UserError: the user interrupted a pack with finished shards, or a worker was killed.
    """
    kept = any(destination.size(record_name(shard.name)) is not None for shard in plan.plans)
    if not kept:
        remove_plan(plan, destination)
    resumable = "; finished shards are kept, run the same command to resume" if kept else ""
    if isinstance(error, WorkerKilledError):
        raise UserError(f"{error}{resumable}", ExitCode.UNEXPECTED) from None
    if isinstance(error, KeyboardInterrupt) and kept:
        raise UserError(f"{interruption()}{resumable}", ExitCode.INTERRUPTED) from None


def require_same_plan(job: PackJob, plan: PackPlan, newest_ns: int, destination: Storage) -> None:
    """Require that an unfinished pack in the destination is one of the same inputs and options.

    Raises:
        UserError: it is not.
    """
    unfinished = read_plan_document(destination)
    if unfinished is None:
        return
    document = plan.identity
    if {key: unfinished.get(key) for key in document} != document:
        raise UserError(
            f"{job.destination}: contains an unfinished pack of other inputs or options; "
            f"{_CHOOSE_ANOTHER}"
        )
    if newest_ns > read_start(destination, newest_ns):
        raise UserError(
            f"{job.destination}: {job.source} has changed since this pack was started; "
            f"{_CHOOSE_ANOTHER}"
        )


def index_options(job: PackJob) -> dict[str, Any]:
    """Return the options that the index records: those that differ from the defaults."""
    options = job.options.non_defaults() | (
        {"instances": job.instances} if job.instances > 1 else {}
    )
    table = job.table
    options |= {
        name: value if isinstance(value, str) else list(value)
        for name, value in (
            ("where", table.where),
            ("caption_columns", table.caption_columns if len(table.caption_columns) > 1 else ()),
            ("keep", table.keep),
            ("index_columns", table.index_columns),
        )
        if value
    }
    folder, resolution = job.options.latents, options.pop("latents_resolution", None)
    if folder is not None and resolution is not None:
        options["latents"] = describe_latents(Path(folder), resolution) | vars(job.options.color)
    return options


def nothing_accepted(source: str, rejected: Mapping[str, int]) -> str:
    """Return the message on a source of which no input is packed."""
    counts = Counter(rejected)
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    return f"{source}: nothing to pack, all {counts.total()} inputs were rejected: {reasons}"


def _read_index(destination: Storage) -> ShardIndex:
    return read_index(destination, INDEX_NAME)


def find_finished(
    job: PackJob, plan: PackPlan, newest_ns: int, destination: Storage
) -> ShardIndex | None:
    """Return the index of a finished pack of the same inputs; None if it is not finished.

    Raises:
        UserError: the destination contains another pack, or an incomplete one.
    """
    if (index := _find_index(job, destination)) is None:
        return None
    header = index.header
    if (header.inputs, header.target_bytes, header.options, header.appended) != (
        plan.fingerprint,
        plan.target_bytes,
        plan.index_options,
        [],
    ):
        raise UserError(
            f"{job.destination}: contains a pack of other inputs or options; {_CHOOSE_ANOTHER}, or "
            "add new images with --append"
        )
    if newest_ns > destination.modified_ns(INDEX_NAME):
        raise UserError(
            f"{job.destination}: {job.source} has changed since it was packed; {_CHOOSE_ANOTHER}"
        )
    if (read_plan_document(destination) or {}).get("extends"):
        raise UserError(f"{job.destination}: unfinished append; resume it with --append")
    return index


def _find_index(job: PackJob, destination: Storage) -> ShardIndex | None:
    """Return the index of the pack in the destination, whose shards are complete; None without it.

    Raises:
        UserError: the index is damaged, or shards are missing or have no index.
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
    for name, size in zip(index.names, index.bytes.tolist(), strict=True):
        if destination.size(f"{SHARDS_FOLDER}/{name}") != size:
            shard = destination.address(f"{SHARDS_FOLDER}/{name}")
            raise UserError(f"{shard}: differs from {INDEX_NAME}; {_CHOOSE_ANOTHER}")
    return index


@dataclass(frozen=True)
class FinishedPack:
    """A finished pack that an append extends."""

    index: ShardIndex
    inputs: PackedInputs


def open_finished(job: PackJob, destination: Storage) -> FinishedPack:
    """Return the pack that ``job`` appends to.

    Raises:
        UserError: there is no finished pack, it was packed with other options, or it is incomplete.
    """
    # First: images go from the staged ones to the index.
    arriving = arriving_addresses(destination) if isinstance(destination, S3Prefix) else []
    index = _find_index(job, destination)
    if index is None:
        unfinished = destination.size(PLAN_NAME) is not None
        state = "the pack in it is unfinished" if unfinished else "contains no pack"
        raise UserError(f"--append: {job.destination}: {state}; run the command without --append")
    header = index.header
    if header.inputs is None:
        raise UserError(
            f"--append: {job.destination}: not written by `sm-train pack`; pack the new images "
            "into another folder and list both in data.sources"
        )
    _require_same_options(job, header)
    fingerprints = header.fingerprints
    try:
        inputs = read_packed_inputs(destination, job.access, fingerprints)
    except FileNotFoundError:
        raise UserError(
            f"--append: {destination.address(INPUTS_FOLDER)}: the list of packed images is "
            "missing; pack the new images into another folder and list both in data.sources"
        ) from None
    rows = sum(map(len, inputs.inputs))
    if rows + sum(part.count for part in inputs.streamed) > header.samples:
        inputs = replace(inputs, has_sample=rows_with_samples(index, rows))
    return FinishedPack(index, replace(inputs, arriving=arriving))


def _require_same_options(job: PackJob, header: IndexHeader) -> None:
    if ENRICHED in header.options:
        raise UserError(
            f"--append: {job.destination} has columns of `sm-train enrich`, which new images would "
            "lack; pack these into another folder, enrich them, and list both in data.sources"
        )
    packed = header.options | {"shard_bytes": header.target_bytes}
    new = dict(vars(UNRECORDED_COLOR)) | index_options(job) | {"shard_bytes": job.shard_bytes}
    names = sorted((packed.keys() | new.keys()) - INDEX_OPTIONS - {MADE_CAPTIONS})
    packed |= {name: packed.get(name, value) for name, value in vars(UNRECORDED_COLOR).items()}
    differing = [
        _describe_option(name, packed.get(name))
        for name in names
        if _comparable(name, packed.get(name)) != _comparable(name, new.get(name))
    ]
    if differing:
        how = ", ".join(differing)
        raise UserError(f"--append: {job.destination} was packed {how}; use the same options")


def _comparable(name: str, value: Any) -> Any:
    """Return the value of an option; the order of kept columns says nothing."""
    return sorted(value) if name in ("keep", "index_columns") and value else value


def _describe_option(name: str, value: Any) -> str:
    """Describe an option of a finished pack; ``value`` is None for the default."""
    option = _OPTION_NAMES.get(name, "--" + name.replace("_", "-"))
    if value is None:
        return f"without {option}"
    if isinstance(value, bool):
        return f"with {option}"
    if name == "latents":
        return f"with {option} of another model or --resolution"
    if name == "instances":
        return f"{option} a run of {value} instances"
    return f"with {option} {value}"

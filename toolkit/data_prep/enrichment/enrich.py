"""Makes columns for the images of a source or of shards with a function of the user.

The work is planned first and its parts are made one by one, each stored as a whole. An interrupted
command resumes with the missing parts.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
from sm_train.entrypoints.base.signals import interruption, raise_on_signals
from sm_train.entrypoints.data_prep.enrichment.build_enrichment import (
    EnrichmentWork,
    finalize,
    finished_name,
    make_parts,
)
from sm_train.entrypoints.data_prep.enrichment.column_maker import OPTION, ColumnMaker
from sm_train.entrypoints.data_prep.enrichment.enrichment_batch import EnrichmentError
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import (
    KEPT_RESULT,
    KEPT_SHARDS,
    PLAN_FIELDS,
    RESULT_NAME,
    SOURCE_INDEX,
    SOURCE_REMOVALS,
    TABLE_FOLDER,
    EnrichmentPlan,
    ShardSource,
    TableSource,
    decode_hashes,
    read_enrichment,
    store_plan,
    store_sources,
)
from sm_train.entrypoints.data_prep.enrichment.part_summary import RESULT_FIELDS, EnrichmentResult
from sm_train.entrypoints.data_prep.packing.embedded_images import file_of, is_embedded
from sm_train.entrypoints.data_prep.packing.plan_files import PlannedInputs
from sm_train.entrypoints.data_prep.work.plan_documents import read_checked, read_plan_document
from sm_train.entrypoints.data_prep.work.work_stages import PLAN_NAME, SharedWork
from sm_train.entrypoints.data_prep.work.worker_pool import (
    WorkerKilledError,
    WorkerPlan,
    WorkProgress,
)
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME, SHARDS_FOLDER
from sm_train.entrypoints.job_interface.job_config import (
    ColorPolicy,
    Hdr,
    IccProfile,
    JobConfigError,
)
from sm_train.entrypoints.sample_metadata.column_types import COLUMN_TYPES, ColumnType
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.storage.storage import Storage, open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.estimators.bundle.user_code import defined_names, module_paths
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.data_prep.enrichment.kept_shards import find_kept, is_grown
from sm_train.toolkit.data_prep.packing.inputs import InputSource, PackInputs, find_inputs
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet, find_shard_set
from sm_train.toolkit.data_prep.packing.tables import ALL_COLUMNS, TableOptions
from sm_train.toolkit.data_prep.processing.destination_lock import lock_destination

_REBUILD = "enrich into another folder"
_CHOOSE_ANOTHER = "choose another folder or remove it"


@dataclass(frozen=True)
class EnrichJob:
    """What to enrich, with what, and where to.

    ``function`` is ``module:function``, whose module is in the folder ``code``. ``captions``,
    ``image_column`` and ``where`` describe a table of images, ``index_columns`` are new columns
    that the index of shards keeps. ``accepts_changed_code`` resumes with another version of the
    module. ``icc_profile`` and ``hdr`` are the :class:`ColorPolicy` of the images.
    """

    source: str
    destination: str
    function: str
    code: Path
    model: Path | None
    batch_size: int
    max_side: int
    workers: int
    icc_profile: IccProfile = ColorPolicy.icc_profile
    hdr: Hdr = ColorPolicy.hdr
    captions: str | None = None
    image_column: str = TableOptions.image_column
    where: str | None = None
    index_columns: tuple[str, ...] = ()
    accepts_changed_code: bool = False
    access: S3Access = field(default_factory=S3Access)

    @property
    def maker(self) -> ColumnMaker:
        """How the function is called on this machine."""
        return ColumnMaker(
            self.function,
            str(self.code.resolve()),
            None if self.model is None else str(self.model.resolve()),
            self.batch_size,
            self.max_side,
            self.icc_profile,
            self.hdr,
        )


@dataclass(frozen=True)
class PlannedEnrichment:
    """A plan that is not stored yet, and what it refers to: files, or images in a folder.

    ``parts`` is the number of files to make, ``images`` and ``image_bytes`` are the number and the
    size of their images. ``local`` is one of the images that are local files. ``grows`` if shards
    are added to a finished enrichment.
    """

    plan: EnrichmentPlan
    files: dict[str, bytes]
    folder: Path | None
    parts: int
    images: int
    image_bytes: int
    local: str | None
    grows: bool = False


@dataclass(frozen=True)
class FinishedEnrichment:
    """A finished enrichment; ``up_to_date`` if an earlier command had finished it."""

    job: EnrichJob
    plan: EnrichmentPlan
    result: EnrichmentResult
    up_to_date: bool


def enrich(job: EnrichJob, on_progress: Callable[[WorkProgress], None]) -> FinishedEnrichment:
    """Make the columns on this machine.

    Raises:
        UserError: the source or the function is invalid, the function failed, or the destination
            holds something else.
        OSError: the destination cannot be written, or the disk is full.
    """
    started_ns = time.time_ns()
    with raise_on_signals(), plan_enrichment(job) as planned:
        destination = planned.plan.destination
        if (result := find_finished(planned, job)) is not None:
            if destination.size(PLAN_NAME) is not None:
                # Interrupted between the result and clean-up.
                with lock_destination(destination):
                    EnrichmentWork(planned.plan, job.maker).remove_state()
            return FinishedEnrichment(job, planned.plan, result, up_to_date=True)
        with lock_destination(destination):
            plan = store_or_resume(planned, job, started_ns)
            result = _make(plan, job, on_progress)
        is_whole = plan.inputs == planned.plan.inputs
    # An interrupted command is completed with the shards of its time; the others come after it.
    return FinishedEnrichment(job, plan, result, False) if is_whole else enrich(job, on_progress)


def _make(
    plan: EnrichmentPlan, job: EnrichJob, on_progress: Callable[[WorkProgress], None]
) -> EnrichmentResult:
    work = WorkerPlan(plan.destination, job.access, job.workers)
    shared = SharedWork(plan.destination, is_shared=False)
    try:
        make_parts(plan, job.maker, work, shared, on_progress)
        result = _finalized(plan, job)
    except (EnrichmentError, JobConfigError, ShardError) as error:
        if plan.kept and isinstance(error, ShardError):
            # Its shards are not those of the source any more: the next command plans anew.
            EnrichmentWork(plan, job.maker).remove_state()
            raise UserError(f"{error}; run the same command again") from None
        raise UserError(f"{_option(error)}{error}{_keep_finished(plan, job)}") from None
    except WorkerKilledError as error:
        message = f"{error}{_keep_finished(plan, job)}"
        raise UserError(message, ExitCode.UNEXPECTED) from None
    except KeyboardInterrupt:
        raise UserError(
            f"{interruption()}{_keep_finished(plan, job)}", ExitCode.INTERRUPTED
        ) from None
    if result is None:
        raise UserError(f"{job.destination}: a finished part was removed; run the command again")
    EnrichmentWork(plan, job.maker).remove_state()
    return result


def _finalized(plan: EnrichmentPlan, job: EnrichJob) -> EnrichmentResult | None:
    """Write the result; None if a part is missing.

    Raises:
        UserError: a column has other types in the added shards, which are then made again.
    """
    try:
        return finalize(plan)
    except EnrichmentError as error:
        if not plan.kept:
            raise
        EnrichmentWork(plan, job.maker).remove_state()
        raise UserError(f"{error}; the columns of the added shards are made again") from None


def _option(error: Exception) -> str:
    """Return the option that an error is about, unless the error names it."""
    return "" if str(error).startswith("--") or isinstance(error, ShardError) else f"{OPTION}: "


def _keep_finished(plan: EnrichmentPlan, job: EnrichJob) -> str:
    """Return how many parts are kept for the next command; without any, remove the plan."""
    done = sum(plan.destination.size(finished_name(plan, part)) is not None for part in plan.parts)
    if not done:
        grows = bool(plan.kept)
        EnrichmentWork(plan, job.maker).remove_state()
        for folder in () if grows else (SHARDS_FOLDER, TABLE_FOLDER):
            plan.destination.remove_folder(folder)
        return ""
    return (
        f"; {done:,} of {len(plan.parts):,} parts are finished and kept, run the same command to "
        "resume"
    )


@contextmanager
def plan_enrichment(job: EnrichJob) -> Iterator[PlannedEnrichment]:
    """Find the images and divide them into parts; the files are removed at the end.

    Raises:
        UserError: the source or the function is invalid.
    """
    code = _require_function(job)
    with TemporaryDirectory(prefix="sm-train-plan-") as folder:
        shards = _find_shards(job)
        if shards is None:
            yield _plan_table(job, code, Path(folder))
        else:
            yield _plan_shards(job, code, shards)


def _require_function(job: EnrichJob) -> str:
    """Return the digest of the function's module.

    Raises:
        UserError: it does not exist.
    """
    module, _, function = job.function.partition(":")
    if not module or not function:
        raise UserError(f"{OPTION}: {job.function}: write module:function")
    paths = [job.code / path for path in module_paths(module)]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        raise UserError(
            f"{OPTION}: {job.function}: no module {module} in {job.code}; name its folder with "
            "--code"
        )
    content = path.read_bytes()
    try:
        defined = defined_names(content)
    except SyntaxError as error:
        raise UserError(f"{OPTION}: {job.function}: {path}:{error.lineno}: {error.msg}") from None
    if defined is not None and function.partition(".")[0] not in defined:
        raise UserError(f"{OPTION}: {job.function}: {path} defines no {function}")
    if job.model is not None and not job.model.is_dir():
        raise UserError(f"--model: {job.model}: no such folder")
    return hashlib.sha256(content).hexdigest()


def _find_shards(job: EnrichJob) -> ShardSet | None:
    """Return the shards at the source; None if it is anything else."""
    if job.captions is not None or not _may_be_folder(job.source):
        return None
    shards = find_shard_set(job.source, job.access)
    return shards if shards.storage.size(shards.index_file) is not None else None


def _may_be_folder(source: str) -> bool:
    if source.startswith("s3://"):
        return bool(source.removeprefix("s3://").partition("/")[2].strip("/"))
    return Path(source).is_dir()


def _plan_shards(job: EnrichJob, code: str, shards: ShardSet) -> PlannedEnrichment:
    for option, value in (("--where", job.where), ("--captions", job.captions)):
        if value is not None:
            raise UserError(f"{option}: {job.source} is a set of shards; it needs a table")
    with shards.open_index() as (index, _):
        taken = [name for name in job.index_columns if name in index.header.columns]
        if taken:
            raise UserError(f"--index-column: {job.source} has a column {taken[0]} already")
        content = Path(index.path).read_bytes()
        place = _absolute(shards.storage.address(""))
        origin = ShardSource(place, shards.name, index.header.samples, job.index_columns)
        removals = shards.read_list()
        if removals.rewrites:
            raise UserError(
                f"{job.source}: samples are being removed from it; finish that with "
                "`sm-train remove`"
            )
        digest = hashlib.sha256(content)
        digest.update(removals.encode())
        files = {SOURCE_INDEX: content, SOURCE_REMOVALS: removals.encode()}
        plan = _plan(job, code, digest.hexdigest(), origin, shards.address)
        kept = find_kept(plan, index, removals, job.index_columns)
        files |= kept
        known = decode_hashes(kept[KEPT_SHARDS]) if kept else {}
        is_new = np.array([name not in known for name in index.names], np.bool_)
        local = None if job.source.startswith("s3://") else job.source
        return PlannedEnrichment(
            plan,
            files,
            None,
            int(is_new.sum()),
            int(index.samples[is_new].sum()),
            int(index.bytes[is_new].sum()),
            local,
            grows=bool(kept),
        )


def _plan_table(job: EnrichJob, code: str, folder: Path) -> PlannedEnrichment:
    if job.index_columns:
        raise UserError(
            f"--index-column: {job.source} is no set of shards with an index; give it to "
            "`sm-train pack`"
        )
    table = TableOptions(job.image_column, (), (ALL_COLUMNS,), (), job.where)
    try:
        inputs = _find_inputs(job, table, folder)
    except UserError as error:
        if Path(job.source).is_dir() and next(Path(job.source).rglob("*.tar"), None) is not None:
            raise UserError(
                f"{job.source}: has shards without an index; `sm-train index` writes it"
            ) from None
        raise error
    root = _absolute(inputs.root)
    types = {
        column.name: cast("ColumnType", column.type)
        for column in inputs.preview
        if column.type in COLUMN_TYPES and column.name != job.image_column
    }
    origin = TableSource.of(inputs.images, root, job.image_column, inputs.made_columns, types)
    plan = _plan(job, code, inputs.fingerprint, origin)
    parts, size = len(origin.parts), inputs.image_bytes
    return PlannedEnrichment(plan, {}, folder, parts, inputs.images, size, inputs.local)


def _find_inputs(job: EnrichJob, table: TableOptions, folder: Path) -> PackInputs:
    source = InputSource(
        job.source, job.captions, table, convert=True, access=job.access, preview=True
    )
    inputs = find_inputs(source, folder)
    if not inputs.images:
        raise UserError(f"{job.source}: all {inputs.rejected} rows were rejected: no image in them")
    first = next(iter(PlannedInputs(inputs.files, inputs.root, 0, 1)))
    if is_embedded(first.address):
        raise UserError(
            f"{job.source}: the images are in {file_of(first.address)} itself; pack it, and enrich "
            "the shards"
        )
    return inputs


def _plan(
    job: EnrichJob,
    code: str,
    inputs: str,
    origin: TableSource | ShardSource,
    source: str | None = None,
) -> EnrichmentPlan:
    """Return the plan; ``source`` is the address of shards, whatever the user has named."""
    return EnrichmentPlan(
        _absolute(source or job.source),
        inputs,
        job.maker.as_dict(),
        (code,),
        None if job.model is None else _describe_model(job.model),
        origin=origin,
        destination=open_storage(job.destination, job.access),
        access=job.access,
    )


def _absolute(address: str) -> str:
    """Return a path as it is named from any folder; an address in S3 is unchanged."""
    if address.startswith("s3://") or not address:
        return address
    return str(Path(address).resolve()) + ("/" if address.endswith("/") else "")


def _describe_model(folder: Path) -> str:
    """Return a digest of the names and sizes of a model's files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listing = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def find_finished(planned: PlannedEnrichment, job: EnrichJob) -> EnrichmentResult | None:
    """Return the result of the same work; None if the destination has none, or lacks shards.

    Raises:
        UserError: the destination contains something else.
    """
    plan = planned.plan
    try:
        document = read_checked(plan.destination, RESULT_NAME, RESULT_FIELDS, _REBUILD)
    except (FileNotFoundError, NotADirectoryError):
        return None
    state = "was enriched"
    if not planned.grows:
        _require_same(plan, document, job, state)
    _require_same_code(plan, document["code"], job, state)
    return None if planned.grows else EnrichmentResult.from_dict(document)


def store_or_resume(planned: PlannedEnrichment, job: EnrichJob, started_ns: int) -> EnrichmentPlan:
    """Return the stored plan of the same work, which is stored now unless it is unfinished.

    Raises:
        UserError: the destination contains something else.
    """
    destination = planned.plan.destination
    document = read_plan_document(destination)
    plan = planned.plan
    if document is not None and planned.grows:
        finished = json.loads(planned.files[KEPT_RESULT])
        if document.get("inputs") == finished["inputs"]:
            # Interrupted between the result and clean-up.
            EnrichmentWork(read_enrichment(destination, job.access), job.maker).remove_state()
            document = None
    if document is not None:
        state = "contains unfinished work"
        if not is_grown(plan, document):
            _require_same(plan, document, job, state)
        stored = read_checked(destination, PLAN_NAME, PLAN_FIELDS, _REBUILD)
        known = tuple(stored["code"])
        _require_same_code(plan, known, job, state)
        code = known if plan.code[0] in known else (*known, *plan.code)
        # Of shards, those that were there when the work began.
        plan = replace(read_enrichment(destination, job.access), code=code)
        started_ns = stored["started_ns"]
    elif planned.grows:
        known = tuple(json.loads(planned.files[KEPT_RESULT])["code"])
        plan = replace(plan, code=known if plan.code[0] in known else (*known, *plan.code))
        store_sources(plan, planned.files, None)
    elif _has_files(destination):
        raise UserError(f"{job.destination}: is not empty; {_CHOOSE_ANOTHER}")
    else:
        store_sources(plan, planned.files, planned.folder)
    store_plan(plan, started_ns)
    return read_enrichment(destination, job.access)


def _has_files(destination: Storage) -> bool:
    return destination.size(INDEX_NAME) is not None or any(
        destination.has_files(folder) for folder in (SHARDS_FOLDER, TABLE_FOLDER)
    )


def _require_same(
    plan: EnrichmentPlan, document: dict[str, Any], job: EnrichJob, state: str
) -> None:
    """Require that a stored document describes the same work.

    Raises:
        UserError: it does not.
    """
    # As JSON has it: tuples are lists.
    identity = json.loads(json.dumps(plan.identity))
    for name, value in identity.items():
        if document.get(name) != value:
            other = "of other images" if name in ("source", "inputs") else "with other options"
            raise UserError(f"{job.destination}: {state} {other}; {_CHOOSE_ANOTHER}")


def _require_same_code(
    plan: EnrichmentPlan, known: Sequence[str], job: EnrichJob, state: str
) -> None:
    """Require that the function's module is one of those ``known``, by their digests.

    Raises:
        UserError: it is not.
    """
    if plan.code[0] not in known and not job.accepts_changed_code:
        raise UserError(
            f"{job.destination}: {state} with another version of {job.function}; "
            f"{_CHOOSE_ANOTHER}, or keep what is finished with --accept-changed-code"
        )

"""Creates the index of shards that have none, in a local folder or below an S3 prefix.

Shards that the present index describes are not read again. An interrupted command resumes with the
shards that it has not described.
"""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from sm_train.entrypoints.base.atomic_write import durable_replace, errors_of
from sm_train.entrypoints.base.signals import raise_on_signals
from sm_train.entrypoints.data_prep.indexing.build_index import (
    describe_shards,
    finalize,
    remove_state,
    replace_index,
    versions_digest,
)
from sm_train.entrypoints.data_prep.indexing.index_plan import (
    IndexPlan,
    SampleCheck,
    read_index_plan,
    read_listing,
)
from sm_train.entrypoints.data_prep.packing.describe_shard import DAMAGED
from sm_train.entrypoints.data_prep.packing.shard_builder import read_index, record_name
from sm_train.entrypoints.data_prep.packing.unusable_samples import (
    SampleFiles,
    Unusable,
    UnusableSamples,
)
from sm_train.entrypoints.data_prep.work.work_stages import PLAN_NAME, SharedWork
from sm_train.entrypoints.data_prep.work.worker_pool import (
    WorkerKilledError,
    WorkerPlan,
    WorkProgress,
)
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME
from sm_train.entrypoints.job_interface.job_config import CaptionSource
from sm_train.entrypoints.shards.shard_format import ListedShard, ShardError
from sm_train.entrypoints.shards.shard_index import IndexHeader, RejectedInput, ShardIndex
from sm_train.entrypoints.storage.storage import LocalFolder, Storage
from sm_train.entrypoints.storage.store import S3Access, open_store
from sm_train.entrypoints.storage.stream_upload import PART_BYTES
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet, find_shards_folder
from sm_train.toolkit.data_prep.processing.destination_lock import lock_destination
from sm_train.toolkit.run_file.run_file import load
from sm_train.toolkit.shards.shard_listing import (
    COMPRESSED_SUFFIXES,
    list_compressed,
    list_folder,
    list_prefix,
)

Progress = Callable[[int, int], None]
"""Progress callback ``(bytes_described, bytes_total)``."""


@dataclass(frozen=True)
class IndexResult:
    """The index at ``location``; ``up_to_date`` if it existed and needed no change.

    ``unusable`` are samples that cannot be trained on. ``described`` is the number of shards that
    the index did not describe before, ``known`` that of the others.
    """

    location: str
    header: IndexHeader
    damage: tuple[RejectedInput, ...]
    unusable: Unusable
    up_to_date: bool
    described: int = 0
    known: int = 0


@dataclass(frozen=True)
class IndexJob:
    """The shards at ``address`` to index; see :class:`IndexPlan` for ``headers_only``."""

    address: str
    check: SampleCheck
    headers_only: bool
    access: S3Access


def sample_check(run: Path | None) -> SampleCheck:
    """Return the check for what the run file ``run`` trains on; default: images and ``.txt``.

    Raises:
        UserError: the run file is invalid.
    """
    if run is None:
        return SampleCheck()
    data = load(run).data
    caption = tuple(data.caption_sources()) or (CaptionSource(data.caption_key, None, 1.0),)
    files = SampleFiles(tuple(data.image_key.split(";")), caption)
    return SampleCheck(files, find_missing=data.transform is None)


def index_shards(job: IndexJob, workers: int, progress: Progress) -> IndexResult:
    """Describe the shards that the index lacks, and write it next to them.

    Raises:
        UserError: there are no shards, the index is one of other shards, or another command writes
            to it.
        OSError: something cannot be read or written.
    """
    is_remote = job.address.startswith("s3://")  # boto3 is not part of the base installation
    translate = translate_aws_errors(job.address) if is_remote else nullcontext()
    with raise_on_signals(), translate:
        shards = find_shards_folder(job.address, job.access)
        plan, current = plan_index(shards, job)
        if current is not None:
            return _result(shards, current, up_to_date=True)
        with lock_destination(plan.state):
            store_plan(plan)
            _build(plan, workers, progress)
        _remove_empty(plan.state)
        with shards.open_index() as (index, _):
            return _result(shards, index, described=len(plan.unknown), known=len(plan.known))


def _build(plan: IndexPlan, workers: int, progress: Progress) -> None:
    total = sum(plan.by_name[name].bytes for name in plan.unknown)

    def on_progress(done: WorkProgress) -> None:
        progress(min(done.bytes, total), total)

    work = WorkerPlan(plan.state, plan.access, workers)
    try:
        describe_shards(plan, work, SharedWork(plan.state, is_shared=False), on_progress)
        header = finalize(plan, partial(_replace, plan))
    except ShardError as error:
        raise UserError(str(error)) from None
    except WorkerKilledError as error:
        message = f"{error}; run the same command to resume"
        raise UserError(message, ExitCode.UNEXPECTED) from None
    except KeyboardInterrupt:
        raise UserError(
            "interrupted; described shards are kept, run the same command to resume",
            ExitCode.INTERRUPTED,
        ) from None
    if header is None:
        raise UserError(f"{plan.state.address('')}: a record was removed; run the command again")
    remove_state(plan)


def _replace(plan: IndexPlan, file: IO[bytes]) -> None:
    """Store the index; a local one keeps its mode, and a link to it is followed."""
    storage = plan.storage
    if not isinstance(storage, LocalFolder):
        replace_index(plan, file)
        return
    final = (storage.path / plan.index_file).resolve()
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{INDEX_NAME}.") as temporary:
        path = Path(temporary) / INDEX_NAME
        with errors_of(final), path.open("wb") as copy:
            while content := file.read(PART_BYTES):
                copy.write(content)
        if final.exists():
            path.chmod(stat.S_IMODE(final.stat().st_mode))
        durable_replace(path, final)


def _remove_empty(state: Storage) -> None:
    """Remove the local folders of a plan that is finished."""
    if isinstance(state, LocalFolder):
        for folder in (state.path, state.path.parent):
            with suppress(OSError):  # another plan is in it
                folder.rmdir()


def plan_index(shards: ShardSet, job: IndexJob) -> tuple[IndexPlan, ShardIndex | None]:
    """Return the plan of an index, and the present index if it needs no change.

    Raises:
        UserError: there are no shards, or the index is one of other shards.
    """
    _require_settled(shards)
    listed, compressed = _list(shards)
    options = {
        "samples": job.check.options(),
        "compressed": list(compressed),
        "versions": versions_digest(listed),
    } | ({"headers_only": True} if job.headers_only else {})
    version = shards.storage.version(shards.index_file)
    current = _open_current(shards, version)
    known: frozenset[str] = frozenset()
    is_pack = False
    if current is not None:
        if _is_complete(current, listed, options):
            return _plan(shards, job, options, listed, known, version), current
        is_pack = current.header.inputs is not None
        if is_pack:
            options = current.header.options | options
            listed = _in_order(current, listed)
        known = _known(shards, current, listed, options)
    if not listed:
        raise UserError(_nothing(shards.address, compressed))
    plan = _plan(shards, job, options, listed, known, version)
    return replace(plan, is_pack=is_pack), None


def _plan(
    shards: ShardSet,
    job: IndexJob,
    options: dict[str, Any],
    listed: Sequence[ListedShard],
    known: frozenset[str],
    version: str | None,
) -> IndexPlan:
    parent = shards.storage.address("").rstrip("/") or "/"
    return IndexPlan(
        *(parent, shards.name, job.check, job.headers_only, options, tuple(listed), known, version),
        shards.access,
    )


def _require_settled(shards: ShardSet) -> None:
    """Require that no shard in the folder is to be written or deleted.

    The index of a finished pack has more than ours.

    Raises:
        UserError: `sm-train pack` or `remove` writes to it, or was interrupted.
    """
    address = shards.storage.address("").rstrip("/")
    if shards.storage.size(PLAN_NAME) is not None:
        raise UserError(
            f"{address}: contains unfinished work; finish it with the command that began it, or "
            f"remove {shards.storage.address(PLAN_NAME)} to index the shards that it wrote"
        )
    if shards.read_list().rewrites:
        raise UserError(
            f"{address}: samples are being removed from it; finish that with `sm-train remove`"
        )


def _list(shards: ShardSet) -> tuple[Sequence[ListedShard], Sequence[str]]:
    """Return the shards, and the names of compressed ones."""
    if isinstance(shards.storage, LocalFolder):
        folder = shards.storage.path / shards.name
        return list_folder(folder), list_compressed(folder)
    uri = f"{shards.address}/"
    listing = list_prefix(open_store(shards.access), uri)
    prefix = uri.removeprefix("s3://").partition("/")[2]
    names = [key.removeprefix(prefix) for key in listing.others]
    return listing.shards, [name for name in names if name.endswith(COMPRESSED_SUFFIXES)]


def _nothing(address: str, compressed: Sequence[str]) -> str:
    if compressed:
        return (
            f"{address}: {compressed[0]} is compressed, as are all of its {len(compressed):,} "
            "shards; decompress them, as with gunzip"
        )
    return f"{address}: no .tar in it; create shards with `sm-train pack`"


def _open_current(shards: ShardSet, version: str | None) -> ShardIndex | None:
    """Return the present index; None if there is none, or it cannot be read.

    Raises:
        UserError: it is the index of other shards.
    """
    if version is None:
        return None
    try:
        index = read_index(shards.storage, shards.index_file)
    except ShardError:
        return None
    if index.header.prefix != shards.name:
        raise UserError(
            f"{shards.storage.address(shards.index_file)}: is the index of other shards, of "
            f"{index.header.prefix}/; move it or rename {shards.name}/"
        )
    return index


def _is_complete(
    index: ShardIndex, listed: Sequence[ListedShard], options: Mapping[str, Any]
) -> bool:
    """Return whether an index lists exactly these shards, and the image sizes."""
    indexed = dict(zip(index.names, index.bytes.tolist(), strict=True))
    has_sizes = len(index) == 0 or index.image_sizes(0) is not None
    # Shards of `sm-train pack` have all files, and their index more than this one would.
    is_packed = index.header.inputs is not None
    is_checked = is_packed or options.items() <= index.header.options.items()
    return has_sizes and is_checked and indexed == {shard.name: shard.bytes for shard in listed}


def _in_order(index: ShardIndex, listed: Sequence[ListedShard]) -> list[ListedShard]:
    """Return the shards of an index in its order, then the others: an epoch depends on it."""
    rows = {name: row for row, name in enumerate(index.names)}
    return sorted(listed, key=lambda shard: (rows.get(shard.name, len(rows)), shard.name))


def _known(
    shards: ShardSet,
    index: ShardIndex,
    listed: Sequence[ListedShard],
    options: Mapping[str, Any],
) -> frozenset[str]:
    """Return the names of the shards that the index describes in the same way."""
    if index.header.inputs is not None:
        sizes = dict(zip(index.names, index.bytes.tolist(), strict=True))
        return frozenset(shard.name for shard in listed if sizes.get(shard.name) == shard.bytes)
    listing = read_listing(shards.storage, shards.index_file)
    described = {name: shard for name, (shard, _) in listing.items()}
    header = index.header.options
    same = all(header.get(name) == options.get(name) for name in ("samples", "headers_only"))
    # Without a listing of this very index nothing is known of its shards.
    if not same or header.get("versions") != versions_digest(described.values()):
        return frozenset()
    indexed = {*index.names}  # `sm-train remove` replaces shards of an index
    return frozenset(
        shard.name
        for shard in listed
        if described.get(shard.name) == shard and shard.name in indexed
    )


def store_plan(plan: IndexPlan) -> None:
    """Store a plan; records of an unfinished one stay if they describe the same shards.

    The destination must be locked.
    """
    try:
        earlier = read_index_plan(plan.state, plan.access)
    except FileNotFoundError:
        earlier = None
    if earlier is not None:
        same = (earlier.check, earlier.headers_only) == (plan.check, plan.headers_only)
        for name in earlier.unknown:
            if not same or plan.by_name.get(name) != earlier.by_name[name]:
                plan.state.remove(record_name(name))
    plan.store()


def _result(
    shards: ShardSet,
    index: ShardIndex,
    *,
    up_to_date: bool = False,
    described: int = 0,
    known: int = 0,
) -> IndexResult:
    stored = index.header.options.get("unusable", {})
    unusable = {reason: UnusableSamples(**samples) for reason, samples in stored.items()}
    # A pack also lists the images that it rejected.
    damage = tuple(item for item in index.rejected() if item.reason == DAMAGED)
    location = shards.storage.address(shards.index_file)
    return IndexResult(location, index.header, damage, unusable, up_to_date, described, known)

"""Shows what a pack would do, without reading an image: ``pack --dry-run``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from sm_train.entrypoints.data_prep.packing.stored_plan import PackPlan
from sm_train.entrypoints.shards.shard_index import count_rejected
from sm_train.entrypoints.storage.storage import open_storage
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.append import Comparison
from sm_train.toolkit.data_prep.packing.file_kinds import describe_skipped
from sm_train.toolkit.data_prep.packing.inputs import PackInputs
from sm_train.toolkit.data_prep.packing.pack import (
    FinishedPack,
    PackJob,
    find_finished,
    nothing_accepted,
    open_finished,
    plan_pack,
    read_unfinished_append,
    require_folder,
    require_heic,
    require_same_plan,
)
from sm_train.toolkit.data_prep.packing.pack_report import (
    COMPLETES_APPEND,
    SkippedDocument,
    describe_comparison,
    describe_filtered,
    describe_rejected,
    skipped_document,
)
from sm_train.toolkit.data_prep.packing.table_preview import describe_columns
from sm_train.toolkit.terminal.formatting import plural

_ALREADY_PACKED = "already packed: nothing would be written"
_NOTHING_NEW = "nothing to append: no image would be packed"


class PackPreviewDocument(TypedDict):
    """The output of ``pack --dry-run --json``.

    ``rejected`` is the number of inputs for each reason that is known before an image is read.
    ``columns`` are those of a table (:class:`ColumnPreview`).
    """

    images: int
    shards: int
    bytes: int
    rejected: dict[str, int]
    skipped: dict[str, SkippedDocument]
    filtered: int
    columns: list[dict[str, Any]]
    is_packed: bool


@dataclass(frozen=True)
class PackPreview:
    """What a pack would do: its document, its lines, and how an append compares with the pack."""

    document: PackPreviewDocument
    lines: list[str]
    comparison: Comparison | None = None


def preview_pack(job: PackJob) -> PackPreview:
    """Plan a pack without reading an image or writing anything.

    Raises:
        UserError: there is nothing to pack, or the destination holds another pack.
    """
    destination = open_storage(job.destination, job.access)
    packed: FinishedPack | None = None
    if job.append:
        packed = open_finished(job, destination)
        unfinished = read_unfinished_append(job, packed.index, destination)
        if unfinished is not None:
            document = _document(unfinished, None, is_packed=False)
            return PackPreview(document, [_described(job, unfinished), COMPLETES_APPEND])
    with plan_pack(job, packed, preview=True) as (inputs, plan):
        require_heic(inputs)
        require_folder(job.destination, destination)
        is_packed = inputs.is_empty
        if not job.append:
            is_packed = find_finished(job, plan, inputs.newest_ns, destination) is not None
            if not is_packed:
                require_same_plan(job, plan, inputs.newest_ns, destination)
        if not plan.images and not job.append:
            raise UserError(nothing_accepted(job.source, count_rejected(plan.rejected)))
        document = _document(plan, inputs, is_packed=is_packed)
        lines = [*_notes(plan, inputs)]
        if job.append and not plan.images:
            lines.insert(0, _NOTHING_NEW)
        else:
            lines.insert(0, _ALREADY_PACKED if is_packed else _described(job, plan))
        return PackPreview(document, lines, inputs.comparison)


def _described(job: PackJob, plan: PackPlan) -> str:
    shards = plural(len(plan.plans), "shard")
    size = f"{plan.image_bytes / 1e6:,.1f} MB"
    return f"{plural(plan.images, 'image')}, {size} → {shards} in {job.destination}"


def _notes(plan: PackPlan, inputs: PackInputs) -> Iterator[str]:
    if plan.rejected:
        yield describe_rejected(plan.rejected)
    if inputs.filtered:
        yield describe_filtered(inputs.filtered)
    yield from describe_skipped(inputs.skipped)
    if inputs.comparison is not None:
        yield from describe_comparison(inputs.comparison)
    if inputs.preview:
        yield "columns:"
        yield from describe_columns(inputs.preview)


def _document(plan: PackPlan, inputs: PackInputs | None, *, is_packed: bool) -> PackPreviewDocument:
    return {
        "images": plan.images,
        "shards": len(plan.plans),
        "bytes": plan.image_bytes,
        "rejected": count_rejected(plan.rejected),
        "skipped": {} if inputs is None else skipped_document(inputs.skipped),
        "filtered": 0 if inputs is None else inputs.filtered,
        "columns": [] if inputs is None else [asdict(column) for column in inputs.preview],
        "is_packed": is_packed,
    }

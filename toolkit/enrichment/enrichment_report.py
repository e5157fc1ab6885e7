"""Reports what an enrichment came to, and how to pack it or train on it."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from sm_train.entrypoints.common.index_location import SHARDS_FOLDER
from sm_train.entrypoints.enrichment.enrichment_plan import (
    RESULT_NAME,
    TABLE_FOLDER,
    EnrichmentPlan,
    ShardSource,
    TableSource,
)
from sm_train.toolkit.enrichment.enrich import EnrichJob, FinishedEnrichment
from sm_train.toolkit.terminal.formatting import plural

_MAX_NAMED = 2
"""Images without columns that are named; ``-v`` names those of the result."""


class EnrichmentDocument(TypedDict):
    """The output of ``enrich --json``.

    ``columns`` are the new columns with their types, null for one without any value. ``failed`` is
    the number of images without columns by reason. ``table`` or ``shards`` is where the result is;
    the other one is null.
    """

    images: int
    columns: dict[str, str | None]
    failed: dict[str, int]
    table: str | None
    shards: str | None
    result: str
    up_to_date: bool


def enrichment_lines(enriched: FinishedEnrichment, *, names_all: bool) -> list[str]:
    """Return what was made, which images have no columns, and the next command."""
    job, result = enriched.job, enriched.result
    columns = ", ".join(f"{name} ({kind or 'no value'})" for name, kind in result.columns.items())
    state = "up to date: " if enriched.up_to_date else ""
    lines = [
        f"{state}{plural(result.images, 'image')} with {columns or 'no new column'} in "
        f"{plural(result.parts, 'part')}: {_location(enriched.plan)}"
    ]
    for reason, count in result.failed.items():
        named = [failure for failure in result.failures if failure.reason == reason]
        lines.append(f"without columns: {reason} {count:,}")
        shown = named if names_all else named[:_MAX_NAMED]
        lines += [f"  {failure.source}: {failure.detail}" for failure in shown]
    return [*lines, f"next: {next_step(job, enriched.plan)}"]


def next_step(job: EnrichJob, plan: EnrichmentPlan) -> str:
    """Return the command that packs the table, or the setting that reads the shards."""
    if isinstance(plan.origin, ShardSource):
        return f"set data: {_location(plan)} in the run file"
    table = _location(plan)
    column = "" if job.image_column == "image" else f" --image-column {job.image_column}"
    if not plan.origin.root:  # addresses in S3
        return f"sm-train pack {table} PACK{column} --keep '*'"
    folder = job.source if Path(job.source).is_dir() else plan.origin.root
    return f"sm-train pack {folder} PACK --captions {table}{column} --keep '*'"


def _location(plan: EnrichmentPlan) -> str:
    folder = TABLE_FOLDER if isinstance(plan.origin, TableSource) else SHARDS_FOLDER
    return plan.destination.address(folder)


def enrichment_document(enriched: FinishedEnrichment) -> EnrichmentDocument:
    """Return the document that ``enrich --json`` prints."""
    plan, result = enriched.plan, enriched.result
    is_table = isinstance(plan.origin, TableSource)
    return {
        "images": result.images,
        "columns": result.columns,
        "failed": result.failed,
        "table": _location(plan) if is_table else None,
        "shards": None if is_table else _location(plan),
        "result": plan.destination.address(RESULT_NAME),
        "up_to_date": enriched.up_to_date,
    }

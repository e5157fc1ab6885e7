"""Reports what an enrichment came to, and how to pack it or train on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TypedDict

from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import (
    RESULT_NAME,
    TABLE_FOLDER,
    EnrichmentPlan,
    ShardSource,
    TableSource,
)
from sm_train.entrypoints.job_interface.index_location import SHARDS_FOLDER
from sm_train.toolkit.data_prep.enrichment.enrich import EnrichJob, FinishedEnrichment
from sm_train.toolkit.data_prep.packing.tables import TableOptions
from sm_train.toolkit.terminal.formatting import plural

_CAPTION = TableOptions.caption_columns[0]
"""The column of captions, and the last word in the name of each column that holds some."""

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
    return [*lines, *next_steps(job, enriched.plan, result.columns)]


def next_steps(
    job: EnrichJob, plan: EnrichmentPlan, columns: Mapping[str, str | None]
) -> list[str]:
    """Return the command that packs the table, or the setting that reads the shards.

    ``columns`` are the new ones with their types. Captions of images in S3 may also be those of a
    stream, which `sm-train stream` fills in.
    """
    if isinstance(plan.origin, ShardSource):
        return [f"next: set data: {_location(plan)} in the run file"]
    table = _location(plan)
    options = "" if job.image_column == "image" else f" --image-column {job.image_column}"
    captions = [name for name, kind in columns.items() if _is_caption(name) and kind == "text"]
    if {*captions} - {_CAPTION}:
        named = dict.fromkeys([_CAPTION, *captions])
        options += "".join(f" --caption-column {name}" for name in named)
    root = plan.origin.root
    table = quote(table)
    if not root or root.startswith("s3://"):
        steps = [f"next: sm-train pack {table} PACK{options} --keep '*'"]
        if root and captions:
            fill = f"sm-train stream STACK --add {quote(root)} --captions {table}{options}"
            steps.append(f"  or, if a stream packs {root}: {fill}")
        return steps
    folder = job.source if Path(job.source).is_dir() else root
    return [f"next: sm-train pack {quote(folder)} PACK --captions {table}{options} --keep '*'"]


def _is_caption(column: str) -> bool:
    """Return whether a new column has captions, by its name: `caption`, `generated_caption`."""
    return column == _CAPTION or column.endswith(f"_{_CAPTION}")


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

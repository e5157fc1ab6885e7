"""Shows the progress of a pack, and the results of packing and indexing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypedDict

from sm_train.entrypoints.packing.worker_pool import PackProgress
from sm_train.toolkit.packing.file_kinds import describe_skipped
from sm_train.toolkit.packing.index import IndexResult
from sm_train.toolkit.packing.pack import PackResult
from sm_train.toolkit.terminal.console import stderr_console

FASTFILE_BYTES = 150_000_000
"""FastFile reads few large objects best; AWS recommends at least 150 MB."""

_MAX_NAMED_INPUTS = 2
"""Rejected inputs that are named for each reason; the index lists all of them."""

_MAX_NAMED_DAMAGE = 5
"""Damaged regions that are named; the index lists all of them."""


class SkippedDocument(TypedDict):
    """The skipped files of one kind: their number and the first three."""

    count: int
    first: list[str]


class PackDocument(TypedDict):
    """The output of ``pack --json``.

    ``rejected`` is the number of inputs for each reason. ``skipped`` are the files that are neither
    images nor captions, by kind.
    """

    shards: int
    samples: int
    bytes: int
    rejected: dict[str, int]
    skipped: dict[str, SkippedDocument]
    index: str
    shards_path: str


class DamageDocument(TypedDict):
    """One damaged region of a shard."""

    shard: str
    detail: str


class IndexDocument(TypedDict):
    """The output of ``index --json``."""

    index: str
    shards: int
    samples: int
    bytes: int
    damaged: list[DamageDocument]
    up_to_date: bool


@contextmanager
def progress_bar() -> Iterator[Callable[[PackProgress], None]]:
    """Yield a function that updates a progress bar; it does nothing if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rate]}"),
        TextColumn("rejected {task.fields[rejected]}"),
        TimeRemainingColumn(),
        console=stderr_console(),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None, start=True, rate="", rejected=0, visible=False)

        def update(progress: PackProgress) -> None:
            seconds = bar.tasks[0].elapsed or 1e-9
            images, megabytes = progress.done / seconds, progress.bytes / seconds / 1e6
            bar.update(
                task,
                description=progress.label,
                completed=progress.done,
                total=progress.total,
                rate=f"{images:,.0f} images/s  {megabytes:,.0f} MB/s",
                rejected=progress.rejected,
                visible=True,
            )

        yield update


def print_pack_summary(result: PackResult, *, list_rejected: bool = False) -> None:
    """Print on standard error what was packed and rejected, and advice.

    ``list_rejected`` adds a line for each rejected input.
    """
    _print_lines(pack_summary(result))
    if list_rejected:
        _print_lines(
            f"rejected: {item.source}: {item.reason}: {item.detail}"
            for item in result.index.rejected()
        )


def pack_summary(result: PackResult) -> list[str]:
    """Return the lines of the summary of a pack."""
    index = result.index
    verb = "already packed" if result.up_to_date else "packed"
    lines = [
        f"{verb} {_count(index.header.samples, 'sample')} into {_count(len(index), 'shard')} "
        f"({index.header.bytes / 1e6:,.1f} MB) in {result.shards_path}"
    ]
    if result.rejected_by_reason:
        lines.append(_describe_rejected(result))
    lines += describe_skipped(result.skipped)
    largest = int(index.bytes.max())
    if len(index) > 1 and largest < FASTFILE_BYTES:
        lines.append(
            f"warning: shards of {largest / 1e6:,.1f} MB are small for FastFile; use a "
            "--shard-size of 150 MB or more"
        )
    return lines


def _describe_rejected(result: PackResult) -> str:
    """Return one line: the number of rejected inputs by reason, with the first of each."""
    sources: dict[str, list[str]] = {}
    for item in result.index.rejected():
        sources.setdefault(item.reason, []).append(item.source)
    parts = []
    for reason, named in sources.items():
        more = ", …" if len(named) > _MAX_NAMED_INPUTS else ""
        parts.append(f"{len(named):,} {reason} ({', '.join(named[:_MAX_NAMED_INPUTS])}{more})")
    is_cut = any(len(named) > _MAX_NAMED_INPUTS for named in sources.values())
    where = f"; -v lists all, as does {result.index_path}" if is_cut else ""
    return f"rejected {sum(map(len, sources.values())):,}: {', '.join(parts)}{where}"


def pack_document(result: PackResult) -> PackDocument:
    """Return the document that ``pack --json`` prints."""
    return {
        "shards": result.shards,
        "samples": result.samples,
        "bytes": result.bytes,
        "rejected": result.rejected_by_reason,
        "skipped": {
            kind: {"count": files.count, "first": files.first}
            for kind, files in result.skipped.items()
        },
        "index": result.index_path,
        "shards_path": result.shards_path,
    }


def print_index_summary(result: IndexResult) -> None:
    """Print on standard error what was indexed and what is damaged."""
    header = result.header
    verb = "is up to date" if result.up_to_date else "written"
    lines = [
        f"{result.location} {verb}: {header.samples:,} samples in {header.shards:,} shards "
        f"({header.bytes / 1e6:,.1f} MB)"
    ]
    lines += [
        f"damaged: {item.source}: {item.detail}" for item in result.damage[:_MAX_NAMED_DAMAGE]
    ]
    if len(result.damage) > _MAX_NAMED_DAMAGE:
        lines.append(f"… {len(result.damage):,} damaged regions in total, listed in the index")
    _print_lines(lines)


def index_document(result: IndexResult) -> IndexDocument:
    """Return the document that ``index --json`` prints."""
    return {
        "index": result.location,
        "shards": result.header.shards,
        "samples": result.header.samples,
        "bytes": result.header.bytes,
        "damaged": [{"shard": item.source, "detail": item.detail} for item in result.damage],
        "up_to_date": result.up_to_date,
    }


def _print_lines(lines: Iterable[str]) -> None:
    console = stderr_console(shows_results=True)
    for line in lines:
        # Paths may contain brackets, which must not be read as markup.
        console.print(line, markup=False, soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")

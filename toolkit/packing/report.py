"""What a person sees of packing: the bar while it runs, the summary when it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sm_train.entrypoints.packing.worker_pool import PackProgress
from sm_train.toolkit.packing.pack import Packed
from sm_train.toolkit.terminal.console import stderr_console

FASTFILE_BYTES = 150_000_000
"""FastFile reads fewer, larger objects best; AWS names 150 MB."""

_NAMED = 3
"""Rejected inputs that are named for each reason; the index has them all."""


@contextmanager
def progress_bar() -> Iterator[Callable[[PackProgress], None]]:
    """A function that shows how far packing is: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda tally: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("packing"),
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

        def show(tally: PackProgress) -> None:
            seconds = bar.tasks[0].elapsed or 1e-9
            rate = f"{tally.done / seconds:,.0f} images/s  {tally.bytes / seconds / 1e6:,.0f} MB/s"
            bar.update(
                task,
                completed=tally.done,
                total=tally.total,
                rate=rate,
                rejected=tally.rejected,
                visible=True,
            )

        yield show


def summarize(packed: Packed) -> None:
    """Say on standard error what was packed, what was rejected, and what to do better."""
    for line in summary(packed):
        # Paths may hold anything, so nothing in them is markup.
        stderr_console().print(line, markup=False, soft_wrap=True)


def summary(packed: Packed) -> list[str]:
    """The summary's lines."""
    index = packed.index
    verb = "already packed" if packed.was_there else "packed"
    lines = [
        f"{verb} {_count(index.header.samples, 'sample')} into {_count(len(index), 'shard')} "
        f"({index.header.bytes / 1e6:,.1f} MB) in {packed.shards_path}"
    ]
    for reason, count in packed.rejected_by_reason.items():
        sources = [item.source for item in index.rejected() if item.reason == reason]
        more = f", … all in {packed.index_path}" if count > _NAMED else ""
        lines.append(f"rejected {count:,}: {reason}: {', '.join(sources[:_NAMED])}{more}")
    largest = int(index.bytes.max())
    if len(index) > 1 and largest < FASTFILE_BYTES:
        lines.append(
            f"note: shards of {largest / 1e6:,.1f} MB; FastFile reads few large ones better, "
            "150 MB and more"
        )
    return lines


def document(packed: Packed) -> dict[str, Any]:
    """The shape of ``pack --json``."""
    return {
        "shards": len(packed.index),
        "samples": packed.index.header.samples,
        "bytes": packed.index.header.bytes,
        "rejected": packed.rejected_by_reason,
        "index": str(packed.index_path),
        "shards_path": str(packed.shards_path),
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")

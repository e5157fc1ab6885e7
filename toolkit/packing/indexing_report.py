"""What a person sees of indexing."""

from __future__ import annotations

from typing import Any

from sm_train.toolkit.packing.index import Indexed
from sm_train.toolkit.terminal.console import stderr_console

_NAMED = 5


def summarize(indexed: Indexed) -> None:
    """Say on standard error what was found and what is damaged."""
    header = indexed.header
    verb = "is up to date" if indexed.was_there else "written"
    lines = [
        f"{indexed.place} {verb}: {header.samples:,} samples in {header.shards:,} shards "
        f"({header.bytes / 1e6:,.1f} MB)"
    ]
    lines += [f"damaged: {one.source}: {one.detail}" for one in indexed.rejected[:_NAMED]]
    if len(indexed.rejected) > _NAMED:
        lines.append(f"… {len(indexed.rejected):,} places in all; the index has them")
    for line in lines:
        stderr_console().print(line, markup=False, soft_wrap=True)


def document(indexed: Indexed) -> dict[str, Any]:
    """The shape of ``index --json``."""
    return {
        "index": indexed.place,
        "shards": indexed.header.shards,
        "samples": indexed.header.samples,
        "bytes": indexed.header.bytes,
        "damaged": [{"shard": one.source, "detail": one.detail} for one in indexed.rejected],
        "was_there": indexed.was_there,
    }

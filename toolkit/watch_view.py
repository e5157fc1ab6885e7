"""Each look of a watch: a line for a person, an object for a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sm_train.toolkit.amounts import dollars, number, span
from sm_train.toolkit.output import people
from sm_train.toolkit.status_view import as_document
from sm_train.toolkit.watching import Seen, kind


def shower(*, as_json: bool) -> Callable[[Seen], None]:
    """What shows one look after the other."""
    return _show_json if as_json else _show_line


def watch_document(seen: Seen) -> dict[str, Any]:
    """The status with what was done about it; an object of ``watch --json``."""
    return {
        **as_document(seen.state, datetime.now(UTC)),
        "action": kind(seen.action),
        "message": seen.done,
    }


def _show_json(seen: Seen) -> None:
    sys.stdout.write(json.dumps(watch_document(seen), allow_nan=False) + "\n")
    sys.stdout.flush()


def _show_line(seen: Seen) -> None:
    stage = seen.state.current
    parts = [f"{datetime.now():%H:%M:%S}"]
    if stage is not None:
        parts += [stage.name, stage.state, f"step {stage.step:,}/{stage.iterations:,}"]
        if stage.words.iterations_per_second:
            parts.append(f"{number(stage.words.iterations_per_second)} it/s")
        if stage.words.loss is not None:
            parts.append(f"loss {stage.words.loss:.4f}")
        if stage.remaining_seconds and stage.state == "training":
            parts.append(f"{span(stage.remaining_seconds)} left")
    parts.append(f"{dollars(seen.state.spent_usd)} of {dollars(seen.state.projected_usd)}")
    console = people()
    console.print("  ".join(parts), markup=False)
    if kind(seen.action) != "wait" or "next job" in seen.done:
        console.print(f"  {seen.done}", markup=False)

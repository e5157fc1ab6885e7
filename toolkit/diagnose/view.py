"""A diagnosis in words and as JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sm_train.toolkit.diagnose.diagnosis import Diagnosis
from sm_train.toolkit.diagnose.hits import Match


def document(found: Diagnosis) -> dict[str, Any]:
    """What ``diagnose --json`` prints: unknown is ``null``, times are ISO 8601 in UTC."""
    first = found.first
    return {
        "cause": found.cause,
        "title": found.title,
        "confidence": found.confidence,
        "first_failure": {
            "node": first.node if first else None,
            "rank": first.rank if first else None,
            "time": _iso(first.time) if first else None,
            "line": first.line if first else None,
        },
        "retryable": found.retryable,
        "action": found.action,
        "evidence": [
            {
                "source": _source(hit),
                "node": hit.node,
                "rank": hit.rank,
                "time": _iso(hit.time),
                "line": hit.text,
            }
            for hit in found.evidence
        ],
        "notes": list(found.notes),
    }


def show(found: Diagnosis) -> None:
    """Print the diagnosis for a person."""
    from rich.markup import escape
    from rich.padding import Padding
    from sm_train.toolkit.terminal.console import stdout_console

    console = stdout_console()
    code = "" if found.confidence is None else f" ({found.cause}, {found.confidence} confidence)"
    console.print(f"[bold]{escape(found.title)}[/bold]{code}")
    if found.first is not None:
        console.print(
            f"first failure: {_who(found.first.node, found.first.rank, found.first.time)}"
        )
    if found.retryable is not None:
        console.print(f"retry: {'may help' if found.retryable else 'will not help by itself'}")
    if found.action:
        console.print(f"mend: {escape(found.action)}")
    for hit in found.evidence:
        console.print()
        console.print(f"[dim]{escape(_source(hit))} · {_who(hit.node, hit.rank, hit.time)}[/dim]")
        console.print(Padding(escape(hit.text), (0, 0, 0, 2), expand=False))
    if found.notes:
        console.print()
    for note in found.notes:
        console.print(escape(note))


def _who(node: str | None, rank: int | None, time: float | None) -> str:
    said = [node or "node unknown", "rank unknown" if rank is None else f"rank {rank}"]
    return ", ".join([*said, _iso(time) or "time unknown"])


def _source(hit: Match) -> str:
    return f"{hit.stream}:{hit.order}"


def _iso(time: float | None) -> str | None:
    if time is None:
        return None
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")

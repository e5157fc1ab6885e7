"""Presents a diagnosis in the terminal and as JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypedDict

from sm_train.toolkit.analysis.diagnose.diagnosis import Diagnosis
from sm_train.toolkit.analysis.diagnose.matches import Match
from sm_train.toolkit.analysis.diagnose.signatures import Confidence
from sm_train.toolkit.terminal.console import escaped, stdout_console


class FirstFailureDocument(TypedDict):
    """The node, rank and line that failed first; all null if unknown."""

    node: str | None
    rank: int | None
    time: str | None
    line: str | None


class EvidenceDocument(TypedDict):
    """A log line; ``source`` is its log and line number, as ``algo-1.log:120``."""

    source: str
    node: str | None
    rank: int | None
    time: str | None
    line: str


class DiagnosisDocument(TypedDict):
    """The document of ``diagnose --json``: unknown is null, times are ISO 8601 in UTC.

    ``parent`` is ``program-error`` if ``cause`` is a kind of it, such as ``shape-mismatch``.
    """

    cause: str
    parent: str | None
    title: str
    confidence: Confidence | None
    first_failure: FirstFailureDocument
    retryable: bool | None
    action: str | None
    evidence: list[EvidenceDocument]
    details: list[str]


def document(diagnosis: Diagnosis) -> DiagnosisDocument:
    """Return the document of ``diagnose --json``."""
    first = diagnosis.first
    return {
        "cause": diagnosis.cause,
        "parent": diagnosis.parent,
        "title": diagnosis.title,
        "confidence": diagnosis.confidence,
        "first_failure": {
            "node": first.node if first else None,
            "rank": first.rank if first else None,
            "time": _iso(first.time) if first else None,
            "line": first.line if first else None,
        },
        "retryable": diagnosis.retryable,
        "action": diagnosis.action,
        "evidence": [
            {
                "source": _source(match),
                "node": match.node,
                "rank": match.rank,
                "time": _iso(match.time),
                "line": match.text,
            }
            for match in diagnosis.evidence
        ],
        "details": list(diagnosis.details),
    }


def show(diagnosis: Diagnosis) -> None:
    """Print the diagnosis for users."""
    from rich.padding import Padding

    console = stdout_console()
    confidence = diagnosis.confidence
    kind = f", a kind of {diagnosis.parent}" if diagnosis.parent else ""
    code = "" if confidence is None else f" ({diagnosis.cause}{kind}, {confidence} confidence)"
    console.print(f"[bold]{escaped(diagnosis.title)}[/bold]{code}")
    if diagnosis.first is not None:
        first = diagnosis.first
        console.print(f"first failure: {_origin(first.node, first.rank, first.time)}")
    if diagnosis.retryable is not None:
        console.print(f"retry: {'may help' if diagnosis.retryable else 'will not help on its own'}")
    if diagnosis.action:
        console.print(f"fix: {escaped(diagnosis.action)}")
    for match in diagnosis.evidence:
        console.print()
        origin = _origin(match.node, match.rank, match.time)
        console.print(f"[dim]{escaped(_source(match))} · {origin}[/dim]")
        console.print(Padding(escaped(match.text), (0, 0, 0, 2), expand=False))
    if diagnosis.details:
        console.print()
    for detail in diagnosis.details:
        console.print(escaped(detail))


def _origin(node: str | None, rank: int | None, time: float | None) -> str:
    rank_text = "rank unknown" if rank is None else f"rank {rank}"
    return ", ".join([node or "node unknown", rank_text, _iso(time) or "time unknown"])


def _source(match: Match) -> str:
    return f"{match.stream}:{match.order}"


def _iso(time: float | None) -> str | None:
    if time is None:
        return None
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")

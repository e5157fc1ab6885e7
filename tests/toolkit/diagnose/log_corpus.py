"""Real logs with known causes (tests/toolkit/diagnose/corpus), and the score of `diagnose` on them.

A third of them is held out: no signature was written for them. How well signatures generalize shows
best on logs that nobody has seen: docs/benchmarks.md has the scores of such first looks.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm_train.toolkit.diagnose.diagnosis import NO_FAILURE, UNKNOWN, Diagnosis, diagnose
from sm_train.toolkit.diagnose.log_files import log_files

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class KnownLog:
    """A log, or a folder with one per node, and what `diagnose` should find in it.

    ``causes`` are the acceptable answers; ``program-error`` includes its kinds.
    ``rank`` and ``node`` are None if they do not matter.
    """

    name: str
    source: str
    causes: tuple[str, ...]
    rank: int | None = None
    node: str | None = None
    held_out: bool = False

    @property
    def nameable(self) -> bool:
        """Whether the log shows a cause."""
        return not {NO_FAILURE, UNKNOWN} & set(self.causes)

    def accepts(self, found: Diagnosis) -> bool:
        """Whether an answer is right; a kind of a program error is one too."""
        return found.cause in self.causes or found.parent in self.causes

    def diagnose(self) -> Diagnosis:
        folder = CORPUS / self.name
        return diagnose(log_files([folder if folder.is_dir() else CORPUS / f"{self.name}.log"]))


@dataclass(frozen=True)
class Score:
    """The share of confident answers that are right, and of nameable causes that are found.

    An answer of low confidence is a guess: it counts for recall and ``precision_with_guesses``.
    """

    precision: float
    precision_with_guesses: float
    recall: float
    wrong: tuple[str, ...]
    missed: tuple[str, ...]
    wrong_origin: tuple[str, ...]
    """Logs whose cause is right, but not the rank or the node."""


def corpus() -> list[KnownLog]:
    with (CORPUS / "manifest.toml").open("rb") as file:
        rows = tomllib.load(file)
    return [
        KnownLog(
            name,
            row["source"],
            tuple(row["cause"]),
            row.get("rank"),
            row.get("node"),
            row.get("held_out", False),
        )
        for name, row in rows.items()
    ]


def is_confident(found: Diagnosis) -> bool:
    """Return whether an answer counts for the precision."""
    return found.cause == NO_FAILURE or found.confidence in ("medium", "high")


def score(logs: Iterable[KnownLog]) -> Score:
    """Diagnose ``logs``, and compare the answers with the known causes."""
    answers = [(log, log.diagnose()) for log in logs]
    named = [(log, found) for log, found in answers if found.cause != UNKNOWN]
    confident = [(log, found) for log, found in named if is_confident(found)]
    wrong = [_line(log, found) for log, found in confident if not log.accepts(found)]
    nameable = [(log, found) for log, found in answers if log.nameable]
    missed = [_line(log, found) for log, found in nameable if not log.accepts(found)]
    origin = [
        f"{_line(log, found)}: {found.first.node if found.first else None}, "
        f"rank {found.first.rank if found.first else None}"
        for log, found in nameable
        if log.accepts(found) and not _origin_is_right(log, found)
    ]
    return Score(
        _share(len(confident) - len(wrong), len(confident)),
        _share(sum(log.accepts(found) for log, found in named), len(named)),
        _share(len(nameable) - len(missed), len(nameable)),
        tuple(wrong),
        tuple(missed),
        tuple(origin),
    )


def parts(logs: Sequence[KnownLog]) -> dict[str, list[KnownLog]]:
    return {
        "tuned": [log for log in logs if not log.held_out],
        "held out": [log for log in logs if log.held_out],
    }


def _line(log: KnownLog, found: Diagnosis) -> str:
    return f"{log.name}: {found.cause}, expected {' or '.join(log.causes)}"


def _origin_is_right(log: KnownLog, found: Diagnosis) -> bool:
    first = found.first
    return (log.rank is None or (first is not None and first.rank == log.rank)) and (
        log.node is None or (first is not None and first.node == log.node)
    )


def _share(part: int, total: int) -> float:
    return part / total if total else 1.0

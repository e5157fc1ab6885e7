"""Real logs with known causes (the folder corpus), and the score of `diagnose` on them.

``manifest.toml`` has a paragraph for each log: its source and its cause. The logs of a GitHub owner
with five logs or more are in ``corpus/OWNER.txt``, the others in ``corpus/others-LETTER.txt``. In
these files a line ``=====[ FILE ]=====`` starts a log, and an empty line ends it. To add a log, add
a paragraph to the manifest and one to its text file.

A third of the logs is held out: no signature was written for them. How well signatures generalize
shows best on logs that nobody has seen: docs/benchmarks.md has the scores of such first looks.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from sm_train.toolkit.analysis.diagnose.diagnosis import NO_FAILURE, UNKNOWN, Diagnosis, diagnose
from sm_train.toolkit.analysis.diagnose.log_files import log_files

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

    @property
    def path(self) -> Path:
        """The log's file, or the folder with one per node."""
        folder = log_folder() / self.name
        return folder if folder.is_dir() else folder.with_name(f"{self.name}.log")

    @cache  # noqa: B019 - the logs of the corpus live as long as the process
    def diagnose(self) -> Diagnosis:
        return diagnose(log_files([self.path]))


@dataclass(frozen=True)
class Score:
    """The share of confident answers that are right, and of nameable causes that are found.

    An answer of low confidence counts for recall and ``precision_of_all``.
    """

    precision: float
    precision_of_all: float
    recall: float
    wrong: tuple[str, ...]
    missed: tuple[str, ...]
    wrong_origin: tuple[str, ...]
    """Logs whose cause is right, but not the rank or the node."""


def log_texts() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of the file of every log."""
    for file in sorted(CORPUS.glob("*.txt")):
        _, *parts = _HEADER.split(file.read_bytes())
        last = len(parts) - 1
        for at in range(0, len(parts), 2):
            # An empty line ends every log but the last of a file.
            yield parts[at].decode(), parts[at + 1] if at + 1 == last else parts[at + 1][:-1]


@cache
def log_folder() -> Path:
    """Write every log to a file of its own below a temporary folder, once for each process."""
    folder = TemporaryDirectory(prefix="sm-train-corpus-")
    _folders.append(folder)
    for name, content in log_texts():
        path = Path(folder.name) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return Path(folder.name)


_HEADER = re.compile(rb"^=====\[ (\S+) \]=====\n", re.MULTILINE)
_folders: list[TemporaryDirectory[str]] = []
"""Removed at exit."""


@cache
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

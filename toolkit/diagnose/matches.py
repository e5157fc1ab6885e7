"""The input and the result of scanning a log: streams, matched lines and the report of a scan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from sm_train.toolkit.diagnose.log_lines import parse_line

MAX_TEXT = 500
"""Characters kept of a line."""
PROGRAM_ERROR = "program-error"
"""The code of an exception that ended a process and matches no signature."""

_TAIL_LINES = 400
# Lines of torchrun's final error report, which repeat earlier errors.
_LAUNCHERS = re.compile(r"^raise |ChildFailedError|Root Cause|^(?:[=-]{8,}|Failures:|error_file)")
_ERROR_WORDS = re.compile(
    r"\b(?:[A-Z]\w*(?:Error|Exception)|ERROR|FATAL|CRITICAL|[Ee]rror|[Ff]ailed|[Ff]atal|[Aa]borted|panic"
    r"|Killed|killed|core dumped|NCCL WARN)\b"
)

MatchRole = Literal["cause", "exception", "symptom", "echo", "warning"]


@dataclass(frozen=True)
class LogStream:
    """One log: its content as blocks of bytes of any size, its origin and its last write time."""

    name: str
    blocks: Callable[[], Iterable[bytes]]
    node: str | None = None
    reference: float = 0.0
    """Unix seconds; no line is later. It determines the year of times without one."""
    rank: int | None = None
    """The rank of lines that do not name theirs."""


@dataclass(frozen=True)
class Match:
    """A line that may describe what ended the job.

    ``order`` is its line number in the stream. If ``exact`` is false, ``time`` is that of a
    preceding line. ``uncaught`` means that the line ended a traceback or came from an error event.
    """

    code: str
    role: MatchRole
    stream: str
    order: int
    text: str
    time: float | None = None
    node: str | None = None
    rank: int | None = None
    exact: bool = True
    steps_before: int = 0
    uncaught: bool = False


@dataclass(frozen=True)
class TorchrunFailure:
    """The "first observed failure" of torchrun's summary."""

    rank: int | None
    time: float | None
    exit_code: int | None


@dataclass(frozen=True)
class ScanReport:
    """The result of scanning one stream. ``matches`` are those after which training stopped."""

    stream: str
    node: str | None
    lines: int
    matches: tuple[Match, ...]
    last_line: dict[str, int]
    """Code → line number of its last match; ``matches`` keeps only the first ones of a code."""
    steps: int
    """Training steps; they are counted only while there are matches they may supersede."""
    recovered: dict[str, int]
    """Code → number of matches after which training continued."""
    warnings: tuple[Match, ...]
    last_step_time: float | None
    succeeded: bool
    first_failure: TorchrunFailure | None
    tail: bytes
    reference: float

    def last_lines(self) -> list[Match]:
        """Return the last lines except events; lines that look like errors are symptoms."""
        lines = self.tail.split(b"\n")[:-1][-_TAIL_LINES:]
        matches = []
        for number, raw in enumerate(lines, self.lines - len(lines) + 1):
            line = parse_line(raw.decode("utf-8", "replace"), self.reference)
            text = line.text.strip()[:MAX_TEXT]
            if text and "SMT {" not in text and not _LAUNCHERS.search(text):
                role: MatchRole = "symptom" if _ERROR_WORDS.search(text) else "warning"
                node = line.node or self.node
                matches.append(
                    Match("", role, self.stream, number, text, line.time, node, line.rank)
                )
        return matches

"""What a scan of a log finds: hits, and what the log says beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from sm_train.toolkit.diagnose.log_lines import parse_line

KEPT_TEXT = 500
"""So many characters of a line are kept."""
PROGRAM_ERROR = "program-error"
"""The code of an exception that ended a process and that no signature explains."""

_TAIL_LINES = 400
_LAUNCHERS = re.compile(r"^raise |ChildFailedError|Root Cause|^(?:[=-]{8,}|Failures:|error_file)")
_ERROR_WORDS = re.compile(
    r"\b(?:[A-Z]\w*(?:Error|Exception)|ERROR|FATAL|CRITICAL|[Ee]rror|[Ff]ailed|[Ff]atal|[Aa]borted|panic"
    r"|Killed|killed|core dumped|NCCL WARN)\b"
)

Role = Literal["cause", "exception", "symptom", "echo", "warning"]


@dataclass(frozen=True)
class LogStream:
    """One log: its blocks of bytes (any size), whose it is, and when it was last written."""

    name: str
    blocks: Callable[[], Iterable[bytes]]
    node: str | None = None
    reference: float = 0.0
    """Unix seconds: no line is later. Gives times without a year theirs."""
    rank: int | None = None
    """Whose lines they are where the lines do not say it."""


@dataclass(frozen=True)
class Match:
    """A line that may say what ended the job.

    ``order`` is its number among its stream's lines; a time that is not ``exact`` is that of a
    line shortly before it. ``uncaught``: it ended a traceback, or an event calls it an error.
    """

    code: str
    role: Role
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
class FirstFailure:
    """What torchrun's summary calls the first observed failure."""

    rank: int | None
    time: float | None
    exit_code: int | None


@dataclass(frozen=True)
class Report:
    """What a stream says. ``hits`` are those after which training did not go on."""

    stream: str
    node: str | None
    lines: int
    hits: tuple[Match, ...]
    latest: dict[str, int]
    """Code → the number of the last line that was one: ``hits`` are only the first ones."""
    steps: int
    """Steps seen; they are counted only while there is a hit that they may outlive."""
    survived: dict[str, int]
    warnings: tuple[Match, ...]
    last_step_time: float | None
    succeeded: bool
    first_failure: FirstFailure | None
    tail: bytes
    reference: float

    def last_lines(self) -> list[Match]:
        """The last lines, no events; those that look like errors have the role ``symptom``."""
        lines = self.tail.split(b"\n")[:-1][-_TAIL_LINES:]
        found = []
        for number, raw in enumerate(lines, self.lines - len(lines) + 1):
            line = parse_line(raw.decode("utf-8", "replace"), self.reference)
            text = line.text.strip()[:KEPT_TEXT]
            if text and "SMT {" not in text and not _LAUNCHERS.search(text):
                role: Role = "symptom" if _ERROR_WORDS.search(text) else "warning"
                node = line.node or self.node
                found.append(Match("", role, self.stream, number, text, line.time, node, line.rank))
        return found

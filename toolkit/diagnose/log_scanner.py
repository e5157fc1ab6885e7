"""Reads one log stream for what may have ended the job, in one pass and flat memory.

Only lines that hold a literal of the signatures, an exception or an event are looked at one by
one; a regular expression over large blocks (RE2, linear in time) finds them. A hit counts only as
long as training does not go on after it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from sm_train.toolkit.diagnose.hits import (
    KEPT_TEXT,
    PROGRAM_ERROR,
    FirstFailure,
    LogStream,
    Match,
    Report,
    Role,
)
from sm_train.toolkit.diagnose.log_lines import LogLine, parse_line
from sm_train.toolkit.diagnose.signatures import literals, matching
from sm_train.toolkit.diagnose.tracebacks import BEGIN, CHAINED, IGNORED, Tracebacks
from sm_train.toolkit.jobs.events import Event, parse_event

BLOCK = 1 << 22
_TAIL = 1 << 17
_LOOK_BACK = 1 << 14
"""How far a line's time may stand before it."""
_LONGEST_LINE = 1 << 20
_KEPT_PER_CODE = 64
_STEPS_REMEMBERED = 16
_CHAIN_LINES = 6
_STEPS_SURVIVED = 3
"""So many further steps, and the job survived: one or two may be printed late by other ranks."""

_FIRST_FAILURE = "Root Cause (first observed failure)"
_SUCCESS = ("Reporting training SUCCESS", "Training completed. Do not forget to share your model")
_EVENTS = ('"kind": "error"', '"kind": "end"', '"kind": "start"')

_STEP = (
    rb'"kind": "step", .{0,160}?"step": (\d+)'
    rb"|([\w /.:()-]{0,40}\d%\|[^|\n]*\| +\d+/\d+) \[\d+:\d\d"
    rb"|\[batch=(\d+)/"
    rb"|(?i:\b(?:global_?step|steps?|iter|iteration))[:=\[ ] ?\[? *(\d+)\b"
    rb".{0,160}?(?i:loss|lr|learning.rate|it/s|s/it)"
    rb"|(?i:\bepoch):? +(\d+: +\d+ ?/|\[\d+\]\s*\[ *\d+/)"
    rb"|'loss': .{0,200}'epoch': ([\d.]+)"
)
"""A step that was done: this project's events, tqdm, and what other trainers print."""

_GIVEN = re.compile(
    r"""^\s*(?:SM_[A-Z_]+=|Namespace\()|^\s*[\w.]*(?:caption|prompt|hyperparameter)s?\b.{0,40}[:=]"""
    r"""|["'\s](?:caption|prompt|text|alt)s?["']?\s?[:=]\s?["']"""
    r"""|^\s*(?:raise|return|assert|except|from|import|with|def|class|#)\s"""
    r"""|^\s+(?:if|print|logger|log)\b|^\s*[│|>❱]|^\s*File \"""",
    re.IGNORECASE,
)
"""Words that the program was given or consists of, not what happened to it."""
_HARMLESS = re.compile(
    r"^.{0,100}?(?<![=\w])(?:DEBUG|INFO|WARNING)\b|^\[?W(?:\d{3,4} \d\d:| \w+\.cpp)"
    r"|\b\w+Warning: |^Warning: "
    r"|(?i:\b(?:retrying|will retry|ignor(?:ed|ing)|skipp(?:ed|ing)|fall(?:ing|s) back)\b)"
)
"""A line that says itself that the program goes on."""
_ALWAYS_MEANT = re.compile(
    r"NVRM: |Killed process|death signal|signal SIGTERM|Insufficient capacity error from EC2"
    r"|^(?:SecondaryStatus|FailureReason): |\bloss\b.*\b(?:nan|NaN|inf)\b"
)


def scan(stream: LogStream) -> Report:
    """Read ``stream`` to its end."""
    scanner = _LogScanner(stream)
    for block in whole_lines(stream.blocks()):
        scanner.read(block)
    return scanner.report()


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks that end with a line's end; an endless line is cut."""
    rest = b""
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
            if len(rest) > _LONGEST_LINE:
                yield rest + b"\n"
                rest = b""
    if rest:
        yield rest + b"\n"


def interesting_texts() -> list[str]:
    """What a line must hold one of to be looked at."""
    return list(
        dict.fromkeys((BEGIN, *CHAINED, *IGNORED, _FIRST_FAILURE, *_SUCCESS, *_EVENTS, *literals()))
    )


@cache
def _interesting() -> Any:
    """The same as one expression over bytes."""
    import re2

    return re2.compile("|".join(map(re2.escape, interesting_texts())).encode())


@cache
def _step() -> Any:
    import re2

    return re2.compile(_STEP)


@dataclass
class _LogScanner:
    stream: LogStream
    number: int = 0
    hits: list[Match] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)
    latest: dict[str, int] = field(default_factory=dict)
    survived: Counter[str] = field(default_factory=Counter)
    warnings: dict[str, Match] = field(default_factory=dict)
    steps: int = 0
    recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=_STEPS_REMEMBERED))
    last_step_time: float | None = None
    starts: int = 0
    succeeded: bool = False
    first_failure: FirstFailure | None = None
    summary: dict[str, str] | None = None
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    tail: bytes = b""
    block: bytes = b""
    start: int = 0
    """Where in the block the line at hand begins."""

    # -------------------------------------------------------------- blocks

    def read(self, block: bytes) -> None:
        self.block = block
        position, end = 0, len(block)
        while position < end:
            start = position
            if not self.tracebacks.open and self.summary is None:
                match = _interesting().search(block, position)
                if match is None:
                    self._pass(position, end)
                    break
                start = block.rfind(b"\n", position, match.start()) + 1 or position
                self._pass(position, start)
                position = match.end()
            stop = block.find(b"\n", position)
            self._line(start, stop)
            position = stop + 1
        self._note_last_step()
        self.tail = (self.tail + block)[-_TAIL:] if len(block) < _TAIL else block[-_TAIL:]

    def _pass(self, start: int, stop: int) -> None:
        """Lines without interest, but for the steps that follow a hit."""
        self.number += self.block.count(b"\n", start, stop)
        if not self.hits:
            return
        for match in _step().finditer(self.block, start, stop):
            self._step_done(match)
            if not self.hits:
                return

    def _step_done(self, match: Any) -> None:
        """Count a step once, however many ranks tell of it, and forget what it outlived."""
        step = next(group for group in match.groups() if group is not None)
        if step in self.recent:
            return
        self.recent.append(step)
        self.steps += 1
        borne = self.steps - _STEPS_SURVIVED
        # They are in order, so those outlived come first.
        outlived = bisect_right(self.hits, borne, key=lambda hit: hit.steps_before)
        self._forget(outlived)

    def _forget(self, outlived: int) -> None:
        """The first ``outlived`` hits ended nothing."""
        gone = Counter(hit.code for hit in self.hits[:outlived])
        self.survived += gone
        self.kept -= gone
        del self.hits[:outlived]

    def _note_last_step(self) -> None:
        """The time of about the last step, for hits in the streams of nodes that print none."""
        start = self.block.rfind(b"\n", 0, max(0, len(self.block) - _LOOK_BACK)) + 1
        last = None
        for match in _step().finditer(self.block, start):
            last = match
        if last is not None:
            begin = self.block.rfind(b"\n", 0, last.start()) + 1
            line = self._parse(self.block[begin : self.block.find(b"\n", begin)])
            self.last_step_time = _time_of(line) or self.last_step_time

    # -------------------------------------------------------------- lines

    def _parse(self, raw: bytes) -> LogLine:
        text = raw[:_LONGEST_LINE].decode("utf-8", "replace")
        return parse_line(text, self.stream.reference)

    def _line(self, start: int, stop: int) -> None:
        self.number += 1
        self.start = start
        if self.hits and (step := _step().search(self.block, start, stop)):
            self._step_done(step)
        line = self._parse(self.block[start:stop])
        if self.summary is not None and self._summarize(line):
            return
        if any(text in line.text for text in CHAINED):
            self._retract(line)
        event = parse_event(line.text) if "SMT {" in line.text else None
        found = "other" if event else self.tracebacks.feed(line, self.number)
        if event is not None:
            self._event(event, line)
        elif found == "exception":
            self._uncaught(line)
        elif _FIRST_FAILURE in line.text:
            self.summary = {}
        elif any(text in line.text for text in _SUCCESS):
            self._forget(len(self.hits))
            self.succeeded = True
        elif found == "other":
            self._told(line)

    def _event(self, event: Event, line: LogLine) -> None:
        node = line.node or self.stream.node or f"algo-{event['node'] + 1}"
        said = replace(line, rank=event["rank"], time=event["time"], node=node)
        if event["kind"] == "start":
            # A second start in one log is another attempt of the same work.
            if self.starts:
                self._forget(len(self.hits))
            self.starts += 1
        elif event["kind"] == "end" and event["reason"] == "done":
            self._forget(len(self.hits))
            self.succeeded = True
        elif event["kind"] == "error" and event["code"] != _STALL:
            said = replace(said, text=f"rank {event['rank']} failed: {event['message']}")
            self._uncaught(said)
        else:
            for signature in matching(said.text):
                self._add(signature.code, signature.role, _blamed(event, said))

    def _told(self, line: LogLine) -> None:
        """Note what a message matches, unless it says itself that it ends no job."""
        found = matching(line.text)
        if found and all(self.kept[one.code] >= _KEPT_PER_CODE for one in found):
            self.latest.update((one.code, self.number) for one in found)
            return
        if not found or _GIVEN.search(line.text):
            return
        meant = not _HARMLESS.search(line.text) or _ALWAYS_MEANT.search(line.text)
        for signature in found:
            if meant or signature.role == "warning":
                self._add(signature.code, signature.role, line)

    def _uncaught(self, line: LogLine) -> None:
        """An exception that ended a process, with a signature or without."""
        found = matching(line.text)
        for signature in found:
            self._add(signature.code, signature.role, line, uncaught=True)
        if not found:
            self._add(PROGRAM_ERROR, "exception", line, uncaught=True)

    def _add(self, code: str, role: Role, line: LogLine, *, uncaught: bool = False) -> None:
        self.latest[code] = self.number
        if code in self.warnings if role == "warning" else self.kept[code] >= _KEPT_PER_CODE:
            return
        hit = Match(
            code,
            role,
            self.stream.name,
            self.number,
            line.text.strip()[:KEPT_TEXT],
            self._time(line),
            line.node or self.stream.node,
            self.stream.rank if line.rank is None else line.rank,
            line.time is not None,
            self.steps,
            uncaught,
        )
        if role == "warning":
            self.warnings[code] = hit
        else:
            self.hits.append(hit)
            self.kept[code] += 1

    def _retract(self, line: LogLine) -> None:
        """An exception led to another one: the other is what ended the process."""
        for one in reversed(range(len(self.hits))):
            hit = self.hits[one]
            if self.number - hit.order > _CHAIN_LINES:
                return
            if hit.code == PROGRAM_ERROR and hit.rank == line.rank:
                del self.hits[one]
                self.kept[hit.code] -= 1
                return

    def _time(self, line: LogLine) -> float | None:
        """When ``line`` was said; the nearest line before it may know."""
        if line.time is not None:
            return line.time
        before = self.block[max(0, self.start - _LOOK_BACK) : self.start]
        if len(before) < _LOOK_BACK:
            before = self.tail[len(before) - _LOOK_BACK :] + before
        for raw in reversed(before.split(b"\n")):
            time = _time_of(self._parse(raw))
            if time is not None:
                return time
        return None

    def _summarize(self, line: LogLine) -> bool:
        """Read torchrun's summary of the first failure, a few lines of ``name : value``."""
        assert self.summary is not None
        name, colon, value = line.text.partition(":")
        if line.text.strip().startswith("[") or (colon and name.strip() in _SUMMARY_FIELDS):
            self.summary[name.strip()] = value.strip()
            return True
        said, self.summary = self.summary, None
        rank, exit_code = (_NUMBER.search(said.get(key, "")) for key in ("rank", "exitcode"))
        stamp = parse_line(said.get("time", ""), self.stream.reference)
        first = FirstFailure(
            int(rank[0]) if rank else None, stamp.time, int(exit_code[0]) if exit_code else None
        )
        # Each node's launcher has its own first.
        before = self.first_failure
        if before is None or (first.time or 0.0) < (before.time or 0.0):
            self.first_failure = first
        code = _SIGNALS.get(first.exit_code)
        if code is not None:
            text = f"first observed failure: exit code {said['exitcode']}"
            self._add(code, "symptom", LogLine(text, first.time, None, first.rank))
        return False

    # -------------------------------------------------------------- the end

    def report(self) -> Report:
        if self.summary is not None:
            self._summarize(LogLine(""))
        return Report(
            stream=self.stream.name,
            node=self.stream.node,
            lines=self.number,
            hits=tuple(self.hits),
            latest=self.latest,
            steps=self.steps,
            survived=dict(self.survived),
            warnings=tuple(self.warnings.values()),
            last_step_time=self.last_step_time,
            succeeded=self.succeeded and not self.hits,
            first_failure=self.first_failure,
            tail=self.tail,
            reference=self.stream.reference,
        )


def _time_of(line: LogLine) -> float | None:
    event = parse_event(line.text) if "SMT {" in line.text else None
    return float(event["time"]) if event else line.time


_SIGNALS: dict[int | None, str] = {-9: "process-killed", -11: "segfault", -7: "bus-error"}


def _blamed(event: Event, said: LogLine) -> LogLine:
    """Who tells of a stall is seldom who stalled."""
    rank, node = event.get("blamed_rank"), event.get("blamed_node")
    return replace(
        said,
        rank=said.rank if rank is None else rank,
        node=said.node if node is None else f"algo-{node + 1}",
    )


_STALL = "stall"
"""The code of the monitor's events (entrypoints/monitoring/watchdog.py)."""

_SUMMARY_FIELDS = {"time", "host", "rank", "exitcode", "error_file", "traceback"}
_NUMBER = re.compile(r"-?\d+")

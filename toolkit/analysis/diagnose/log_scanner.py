"""Scans one log stream for what may have ended the job, in one pass and constant memory.

One RE2 pattern finds the lines of a block in which a signature, an exception or an event may be, in
linear time; only those are parsed. A match counts only as long as training does not continue after
it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from sm_train.entrypoints.distributed.nccl_log import parse_nccl_log
from sm_train.toolkit.analysis.diagnose.job_nodes import JobNodes
from sm_train.toolkit.analysis.diagnose.kernel_messages import of_other_programs
from sm_train.toolkit.analysis.diagnose.line_patterns import (
    FIRST_FAILURE,
    SUCCESS,
    BytesMatch,
    searched_pattern,
    step_in,
    step_pattern,
)
from sm_train.toolkit.analysis.diagnose.log_lines import LogLine, parse_line
from sm_train.toolkit.analysis.diagnose.match_list import MatchList
from sm_train.toolkit.analysis.diagnose.matches import (
    MAX_TEXT,
    PROGRAM_ERROR,
    Match,
    MatchRole,
    ScanReport,
    is_harmless,
    is_input_or_source,
)
from sm_train.toolkit.analysis.diagnose.signatures import is_resolved, matching, matching_exception
from sm_train.toolkit.analysis.diagnose.step_counter import StepCounter, line_before_last_steps
from sm_train.toolkit.analysis.diagnose.torchrun_summary import TorchrunSummary, signal_match
from sm_train.toolkit.analysis.diagnose.tracebacks import (
    BEGIN,
    CHAINED,
    Tracebacks,
    quoted_traceback,
)
from sm_train.toolkit.analysis.diagnose.watchdog_lines import WatchdogLines
from sm_train.toolkit.records.job_logs import Event, LogStream, parse_event, whole_lines

_TAIL_BYTES = 1 << 17
_LOOK_BACK_BYTES = 1 << 14
"""How far before a line its time is searched for."""
_MAX_LINE_BYTES = 1 << 20
_MESSAGE_LINES = 3
"""Lines after an exception's type in which its message may start."""
_NO_MESSAGE = ("-- Process ", "====", "----", "****", "[", "{")
"""What follows the exception of a launcher or a relayed one, and is no message."""

_DIRECT_CAUSE = "The above exception was the direct cause"
# '  File "/opt/ml/code/train.py", line 88, in main'
_FRAME = re.compile(rb'^[^\n"]*?\bFile "[^"\n]+", line \d+, in [^\n]*', re.MULTILINE)
# "│ ❱  225 │   mkdir(name, mode)": a traceback of rich
_BOX = re.compile("^[^│\\n]*│ [❱ ] +\\d+ │".encode(), re.MULTILINE)
_HEAD_BYTES = 1 << 14

_STALL, _STALL_RESOLVED = "stall", "stall-resolved"
"""The codes of the watchdog's events (entrypoints/monitoring/watchdog/watchdog.py)."""

# A variable that is not set yet when a handler or a finally clause uses it: the exception that it
# handles is the failure.
_IN_HANDLER = re.compile(r"(?:NameError|UnboundLocalError): ")


def scan(stream: LogStream) -> ScanReport:
    """Scan ``stream`` to its end."""
    scanner = _StreamScanner(stream)
    for block in whole_lines(stream.blocks()):
        scanner.scan_block(block)
    return scanner.report()


@dataclass
class _StreamScanner:
    """Reads a log block by block, and in a block the lines of interest.

    A line is in one of four states. In an open traceback or in torchrun's summary every line
    counts, and so do the few lines after an exception whose message is still missing
    (``unfinished``). Otherwise the scan jumps to the next line that a pattern finds. Lines are
    numbered from 1 and all counted, also the skipped ones: ``line_number`` is that of the line
    being read. ``tail`` holds the end of what was read before ``block``.
    """

    stream: LogStream
    line_number: int = 0
    matches: MatchList = field(default_factory=MatchList)
    steps: StepCounter = field(default_factory=StepCounter)
    nodes: JobNodes = field(default_factory=JobNodes)
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    watchdog: WatchdogLines = field(default_factory=WatchdogLines)
    summary: TorchrunSummary = field(init=False)
    start_events: int = 0
    succeeded: bool = False
    unfinished: tuple[LogLine, int] | None = None
    """An unknown exception that ends with a colon, and its line: its message may follow."""
    tail: bytes = b""
    block: bytes = b""
    line_start: int = 0
    """Offset of the current line in the block."""

    def __post_init__(self) -> None:
        self.summary = TorchrunSummary(self.stream.reference)

    # -------------------------------------------------------------- blocks

    def scan_block(self, block: bytes) -> None:
        """Scan a block of whole lines, jumping from one line of interest to the next."""
        if self.line_number == 0:
            self.tracebacks.learn_common_prefix(block)
            self._open_truncated_traceback(block)
        self.nodes.read_names(block)
        self.block = block
        position, end = 0, len(block)
        while position < end:
            start = position
            if not (self.tracebacks.open or self.summary.is_open or self.unfinished):
                found = searched_pattern().search(block, position)
                if found is None:
                    self._skip_lines(position, end)
                    break
                start = block.rfind(b"\n", position, found.start()) + 1 or position
                self._skip_lines(position, start)
            stop = block.find(b"\n", start)
            self._scan_line(start, stop)
            position = stop + 1
        self._update_last_step()
        self.tail = (
            (self.tail + block)[-_TAIL_BYTES:] if len(block) < _TAIL_BYTES else block[-_TAIL_BYTES:]
        )

    def _open_truncated_traceback(self, block: bytes) -> None:
        """Open the traceback at the start of a log whose first lines are missing."""
        first = block.find(BEGIN.encode())
        end = min(_HEAD_BYTES, first if first >= 0 else len(block))
        if box := _BOX.search(block, 0, end):
            self.tracebacks.learn_prefix(self._parse(box[0]), "│")
        frame = _FRAME.search(block, 0, end)
        if frame is None:
            return
        self.tracebacks.learn_prefix(self._parse(frame[0]), "  File ")
        self.tracebacks.open_truncated(self._parse(frame[0]))

    def _skip_lines(self, start: int, stop: int) -> None:
        """Count lines that need no parsing, and the steps that follow a match."""
        first = self.line_number + 1
        self.line_number += self.block.count(b"\n", start, stop)
        if not self.matches:
            return
        for step_match in step_pattern().finditer(self.block, start, stop):
            self._count_step(step_match, first, start)
            if not self.matches:
                return

    def _count_step(self, step_match: BytesMatch, number: int, start: int) -> None:
        """Count a step and remove the matches that it outlived.

        ``number`` is that of the line at the offset ``start``, at or before the step.
        """
        last = self.matches.last
        assert last is not None

        def lines_after_error() -> int:
            return number + self.block.count(b"\n", start, step_match.start()) - last.order

        if self.steps.is_new(step_match, lines_after_error):
            self.matches.recover(self.steps.count)
            if not self.matches:
                self.watchdog.forget()

    def _update_last_step(self) -> None:
        """Store the approximate time of the last step, for matches on nodes that log no steps."""
        start = self.block.rfind(b"\n", 0, max(0, len(self.block) - _LOOK_BACK_BYTES)) + 1
        last = None
        for step_match in step_pattern().finditer(self.block, start):
            last = step_match
        if last is not None:
            begin = self.block.rfind(b"\n", 0, last.start()) + 1
            line = self._parse(self.block[begin : self.block.find(b"\n", begin)])
            self.steps.last_time = _time_of(line) or self.steps.last_time
            self.steps.last = step_in(last).decode("utf-8", "replace").split("|")[-1].strip(" :[")

    # -------------------------------------------------------------- lines

    def _parse(self, raw: bytes) -> LogLine:
        text = raw[:_MAX_LINE_BYTES].decode("utf-8", "replace")
        line = parse_line(text, self.stream.reference, self.tracebacks.prefixes)
        if line.node is None and line.task in self.nodes.task_hosts:
            # The task is a node's, not a rank's.
            return replace(line, node=self.nodes.task_hosts[line.task], task=None)
        return line

    def _scan_line(self, start: int, stop: int) -> None:
        self.line_number += 1
        self.line_start = start
        if self.matches and (step_match := step_pattern().search(self.block, start, stop)):
            self._count_step(step_match, self.line_number, start)
        line = self._parse(self.block[start:stop])
        if BEGIN in line.text:
            if quoted := quoted_traceback(line.text):
                for text in quoted:
                    self._classify(replace(line, text=text, label="quoted"))
                return
            if self.tracebacks.learn_prefix(line):
                bare, line = line, self._parse(self.block[start:stop])
                self.tracebacks.assume(bare, line)
        self._classify(line)

    def _classify(self, line: LogLine) -> None:
        """Dispatch a parsed line to what it is part of."""
        node = line.node or self.stream.node
        self.nodes.read_rank(line, node)
        if self.summary.is_open and self._read_summary(line):
            return
        if self.unfinished is not None and self._finish_exception(line):
            return
        if any(text in line.text for text in CHAINED):
            is_cause = _DIRECT_CAUSE in line.text
            self.matches.remove_chained(line.rank, self.line_number, is_cause=is_cause)
        self.nodes.read_network(line, node)
        rank = self.stream.rank if line.rank is None else line.rank
        self.watchdog.read(line, rank, node or line.host, self.line_number)
        event = parse_event(line.text) if "SMT {" in line.text else None
        part = "other" if event else self.tracebacks.feed(line, self.line_number)
        if event is not None:
            self._match_event(event, line)
        elif part == "exception":
            self._match_exception(replace(line, text=line.text.lstrip()))
        elif part == "harmless":
            self.matches.harmless.append(self.line_number)
        elif any(text in line.text for text in FIRST_FAILURE):
            self.summary.begin(line.node)
        elif any(text in line.text for text in SUCCESS) and not is_input_or_source(line.text):
            self.matches.recover()
            self.succeeded = True
        elif part == "other":
            self._match_message(line)

    def _attributed(self, event: Event, line: LogLine) -> LogLine:
        """Attribute an event to the rank it is about, which is seldom the one that reports it."""
        rank, node = event.get("blamed_rank", event.get("rank_died")), event.get("blamed_node")
        if rank is None and node is None:
            return line
        name = line.node if node is None else self.nodes.node_name(node)
        return replace(line, rank=rank, node=name)

    def _match_event(self, event: Event, line: LogLine) -> None:
        """Match one of this project's events, whose node, rank and time are exact."""
        node = line.node or self.stream.node or line.host or self.nodes.node_name(event["node"])
        line = replace(line, rank=event["rank"], time=event["time"], node=node)
        if event["kind"] == "start":
            # A second start in one log is another attempt of the same job.
            if self.start_events:
                self.matches.recover()
                self.watchdog.forget()
            self.start_events += 1
            self.nodes.read_start(event)
        elif event["kind"] == "end" and event["reason"] == "done":
            self.matches.recover()
            self.succeeded = True
        elif event.get("code") == _STALL_RESOLVED:
            self.matches.remove(_STALL)
        elif event["kind"] == "error" and event["code"] != _STALL:
            text = f"rank {event['rank']} failed: {event['message']}"
            self._match_exception(replace(line, text=text))
        else:
            for signature in matching(line.text):
                self._add(signature.code, signature.role, self._attributed(event, line))

    def _match_message(self, line: LogLine) -> None:
        """Add the signatures of a message, unless it shows that the program continues."""
        codes = {match.code for match in self.matches.matches}
        for code in {code for code in codes if is_resolved(code, line.text)}:
            self.matches.remove(code)
        signatures = matching(line.text.strip())
        if signatures and self.matches.is_full(signature.code for signature in signatures):
            last_line = self.matches.last_line
            last_line.update((signature.code, self.line_number) for signature in signatures)
            return
        if not signatures or is_input_or_source(line.text):
            return
        harmful = not is_harmless(line.text)
        for signature in signatures:
            if harmful or signature.role == "warning":
                self._add(signature.code, signature.role, line)

    def _match_exception(self, line: LogLine) -> None:
        """Add an exception that ended a process, by its signature or as a program error."""
        is_in_handler = _IN_HANDLER.match(line.text) is not None
        if self.matches.restore_handled(line.rank, is_in_handler=is_in_handler):
            return
        library = self.tracebacks.library
        signatures = matching_exception(line.text, library)
        for signature in signatures:
            self._add(signature.code, signature.role, line, uncaught=True)
        if not signatures:
            self._add(PROGRAM_ERROR, "exception", line, uncaught=True)
            if library is not None:
                self.matches.mark_in_library()
            if line.text.rstrip().endswith(":"):
                self.unfinished = line, self.line_number
        elif not matching(line.text):
            self.matches.mark_loose(len(signatures))

    def _finish_exception(self, line: LogLine) -> bool:
        """Read the message of an exception that starts on the line after its type.

        A longer message is read on only if its next line shows a known failure.
        """
        assert self.unfinished is not None
        begun, number = self.unfinished
        if self.line_number - number > _MESSAGE_LINES:
            self.unfinished = None
        text = line.text.strip()
        if self.unfinished is None or not text or line.source != begun.source:
            return False
        self.unfinished = None
        whole = replace(begun, text=f"{begun.text.strip()} {text}")
        is_known = bool(matching_exception(whole.text, self.tracebacks.library))
        begins = BEGIN in text or text.startswith(_NO_MESSAGE)
        last = self.matches.last
        if last is None or last.order != number or begins:
            return False
        if not is_known and begun.text.strip().count(":") > 1:
            return False
        self.matches.pop()
        self._match_exception(whole)
        return True

    def _read_summary(self, line: LogLine) -> bool:
        """Read a line of torchrun's summary; return False after its end, which may be a match."""
        if self.summary.read(line):
            return True
        assert self.summary.ended is not None
        if found := signal_match(self.summary.ended):
            self._add(found[0], "symptom", found[1])
        return False

    def _add(self, code: str, role: MatchRole, line: LogLine, *, uncaught: bool = False) -> None:
        self.matches.last_line[code] = self.line_number
        if not self.matches.is_wanted(code, role):
            return
        if role != "warning" and not self.matches:
            self.steps.remember(self.block, self.line_start)
        self.matches.add(
            Match(
                code,
                role,
                self.stream.name,
                self.line_number,
                line.text.strip()[:MAX_TEXT],
                self._time(line),
                line.node or self.stream.node or line.host,
                self.stream.rank if line.rank is None else line.rank,
                line.time is not None,
                self.steps.count,
                uncaught,
                line.local_rank,
                line.task,
            )
        )

    def _time(self, line: LogLine) -> float | None:
        """Return the time of ``line`` or of the nearest line before it that has one."""
        if line.time is not None:
            return line.time
        before = self.block[max(0, self.line_start - _LOOK_BACK_BYTES) : self.line_start]
        if len(before) < _LOOK_BACK_BYTES:
            before = self.tail[len(before) - _LOOK_BACK_BYTES :] + before
        for raw in reversed(before.split(b"\n")):
            time = _time_of(self._parse(raw))
            if time is not None:
                return time
        return None

    # -------------------------------------------------------------- the end

    def report(self) -> ScanReport:
        if self.summary.is_open:
            self._read_summary(LogLine(""))
        found, nodes = self.matches.at_end(), self.nodes
        others = of_other_programs(found, lambda: whole_lines(self.stream.blocks()))
        matches = tuple(match for match in found if match not in others)
        return ScanReport(
            stream=self.stream.name,
            node=self.stream.node,
            lines=self.line_number,
            matches=matches,
            other_programs=tuple(others),
            last_line=self.matches.last_line,
            steps=self.steps.count,
            recovered=dict(self.matches.recovered),
            warnings=tuple(self.matches.warnings.values()),
            last_step_time=self.steps.last_time,
            last_step=self.steps.last,
            harmless=frozenset((*self.matches.harmless, *(match.order for match in others))),
            succeeded=self.succeeded and not matches,
            first_failure=self.summary.first,
            ranks={node: frozenset(ranks) for node, ranks in nodes.ranks.items()},
            ranks_per_node=nodes.ranks_per_node,
            nodes=nodes.nodes,
            world_size=nodes.world_size,
            hosts=nodes.hosts,
            outlived=line_before_last_steps(self.tail, self.line_number),
            tail=self.tail,
            reference=self.stream.reference,
            prefixes=self.tracebacks.prefixes,
            nccl={node: parse_nccl_log(lines) for node, lines in nodes.nccl.items()},
            timeouts=self.watchdog.timeouts,
        )


def _time_of(line: LogLine) -> float | None:
    event = parse_event(line.text) if "SMT {" in line.text else None
    return float(event["time"]) if event else line.time

"""Scans one log stream for what may have ended the job, in one pass and constant memory.

One RE2 pattern finds the lines of a block in which a signature, an exception or an event may be, in
linear time; only those are parsed. A match counts only as long as training does not continue after
it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

from sm_train.entrypoints.common.sagemaker_paths import host_name
from sm_train.entrypoints.doctor.nccl_log import LITERALS as NCCL_LITERALS
from sm_train.entrypoints.doctor.nccl_log import parse_nccl_log
from sm_train.toolkit.diagnose.kernel_messages import of_other_programs
from sm_train.toolkit.diagnose.log_lines import LogLine, parse_line
from sm_train.toolkit.diagnose.matches import (
    MAX_TEXT,
    PROGRAM_ERROR,
    STEPS_TO_RECOVER,
    LogStream,
    Match,
    MatchRole,
    ScanReport,
    TorchrunFailure,
    is_harmless,
    is_input_or_source,
)
from sm_train.toolkit.diagnose.signatures import (
    is_resolved,
    matching,
    matching_exception,
    searched_patterns,
)
from sm_train.toolkit.diagnose.tracebacks import (
    BEGIN,
    CHAINED,
    IGNORED,
    Tracebacks,
    quoted_traceback,
)
from sm_train.toolkit.jobs.event_lines import Event, parse_event

READ_BYTES = 1 << 22
_TAIL_BYTES = 1 << 17
_AUTOMATON_BYTES = 64 << 20
_LOOK_BACK_BYTES = 1 << 14
"""How far before a line its time is searched for."""
_STEP_LOOK_BACK_BYTES = 1 << 12
"""How far before a match the steps are looked for that progress bars repeat after it."""
_MAX_LINE_BYTES = 1 << 20
_MAX_PER_CODE = 64
_MAX_NCCL_LINES = 2000
_STEPS_REMEMBERED = 16
_STEPS_AFTER_ERROR = 2
"""After an error, one step may be a line that was buffered; two show that training continued."""
_HARMLESS_REMEMBERED = 16
_CHAIN_LINES = 6
_REDRAWN_LINES = 2
"""Lines after an error in which a progress bar is no new step: a program's end redraws it."""
_UNFINISHED_BAR = re.compile(rb"\d%\|[^|]*\| +(\d+)/(?!\1\b)")
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
_FIRST_FAILURE = ("Root Cause (first observed failure)", "Root Cause:")
# A line which reports that the whole training ended as intended:
#   … sagemaker-training-toolkit INFO     Reporting training SUCCESS
#   Training completed. Do not forget to share your model …            Hugging Face's Trainer
#   `Trainer.fit` stopped: `max_epochs=10` reached.                    Lightning
#   "name": "torchelastic.worker.status.SUCCEEDED"                     torchrun
#   2026-11-21 10:00:00 Completed - Training job completed             the SageMaker SDK
#   {'train_runtime': 5211.2, 'train_loss': 0.95, …}                   Hugging Face's Trainer
#   [default] worker group successfully finished. Waiting 300 seconds …  torchrun
#   [after training is done] datetime: 2026-11-21 10:00:00             Megatron-LM
SUCCESS = (
    "Reporting training SUCCESS",
    "Training completed. Do not forget to share your model",
    "`Trainer.fit` stopped: `max_",
    "torchelastic.worker.status.SUCCEEDED",
    "Completed - Training job completed",
    "'train_runtime': ",
    "worker group successfully finished",
    "[after training is done] datetime:",
)
# "… NCCL INFO comm 0x55cc8aa86c70 rank 0 nranks 16 cudaDev 0 … - Init START"
_COMMUNICATOR = " nranks "
_COMMUNICATOR_SIZE = re.compile(r"NCCL INFO .* nranks (\d{1,6}) ")
# A node's first line on Kubernetes and Slurm (entrypoints/node_start/start.py), after the prefix of
# `srun --label`: "1: sm-train start: node 1 of 2 (ip-10-1-9; …"
_NODE_START = "sm-train start: node "
_NODE_STARTED = re.compile(
    rb"^(?: *(\d+): )?[^\n]{0,300}?" + _NODE_START.encode() + rb"(\d+) of \d+ \(([^;\s]{1,253});",
    re.MULTILINE,
)
_EVENTS = ('"kind": "error"', '"kind": "end"', '"kind": "start"', '"code": "stall-resolved"')

# A completed training step; one group holds text that is the same for all ranks of a step:
#   SMT {"kind": "step", "time": 1795300000.0, …, "step": 120, …       this project's event
#     5%|▌         | 72/1398 [1:12:34<24:31:08, 66.57s/it]              tqdm
#   [batch=120/5000]:                                                  Composer
#   step 120 loss 0.31 lr 1.0e-04, global_step=120 … 1.8 it/s          many training loops
#   Epoch: [3] [ 120/5000] …, epoch 3: 120/5000 …                      torchvision's references
#   {'loss': 0.31, 'grad_norm': 1.2, …, 'epoch': 0.12}                 Hugging Face Trainer
_STEP = (
    rb'"kind": "step", .{0,160}?"step": (\d+)'
    rb"|([\w /.:()-]{0,40}\d%\|[^|\n]*\| +[1-9]\d*/\d+) \[\d+:\d\d"
    rb"|\[batch=(\d+)/"
    rb"|(?i:(?:\b|\x1b\[\d+m)(?:global_?step|steps?|iter|iteration))[:=\[ ] ?\[? *(\d+)\b"
    rb".{0,160}?(?i:loss|lr|learning.rate|it/s|s/it)"
    rb"|(?i:(?:\b|\x1b\[\d+m)epoch):? +(\d+: +\d+ ?/|\[\d+\]\s*\[ *\d+/)"
    rb"|'loss': .{0,200}'epoch': ([\d.]+)"
)

# "Loading pipeline components...:  43%|", "Fetching 12 files: …", "model.safetensors: …"
_LOADING = re.compile(
    rb"(?i:\b(?:loading|fetching|downloading|map|tokenizing|generating \w+ split)\b"
    rb"|\.(?:safetensors|bin|json|pt|ckpt|tar|parquet)\b)"
)


class _BytesMatch(Protocol):
    """A match of RE2, which ships no types."""

    def start(self) -> int: ...
    def end(self) -> int: ...
    def groups(self) -> tuple[bytes | None, ...]: ...


class _BytesPattern(Protocol):
    """A compiled pattern of RE2 over bytes, which ships no types."""

    def search(self, text: bytes, start: int = ..., stop: int = ..., /) -> _BytesMatch | None: ...
    def finditer(
        self, text: bytes, start: int = ..., stop: int = ..., /
    ) -> Iterator[_BytesMatch]: ...


def scan(stream: LogStream) -> ScanReport:
    """Scan ``stream`` to its end."""
    scanner = _StreamScanner(stream)
    for block in whole_lines(stream.blocks()):
        scanner.scan_block(block)
    return scanner.report()


def _step_in(step_match: _BytesMatch) -> bytes:
    return next(group for group in step_match.groups() if group is not None)


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Regroup ``blocks`` so that each ends with a newline; lines above 1 MiB are split."""
    rest = b""
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
            if len(rest) > _MAX_LINE_BYTES:
                yield rest + b"\n"
                rest = b""
    if rest:
        yield rest + b"\n"


@cache
def searched_pattern() -> _BytesPattern:
    """Return one pattern of everything that the scan looks for: other lines are not parsed."""
    import re2

    literals = (BEGIN, *CHAINED, *IGNORED, *_FIRST_FAILURE, *SUCCESS, *_EVENTS, _COMMUNICATOR)
    patterns = [re2.escape(text).encode() for text in (*literals, *NCCL_LITERALS)]
    patterns += searched_patterns()
    options = re2.Options()
    # Without enough memory for its automaton, RE2 falls back to slower ones.
    options.max_mem = _AUTOMATON_BYTES
    options.never_capture = True
    compiled: _BytesPattern = re2.compile(
        b"|".join(b"(?:%b)" % pattern for pattern in patterns), options
    )
    return compiled


@cache
def _step_pattern() -> _BytesPattern:
    import re2

    pattern: _BytesPattern = re2.compile(_STEP)
    return pattern


@dataclass
class _StreamScanner:
    """The state of a scan: counters, matches, and the block that is being read."""

    stream: LogStream
    line_number: int = 0
    matches: list[Match] = field(default_factory=list)
    """In order of their lines; those that training outlived are removed."""
    per_code: Counter[str] = field(default_factory=Counter)
    """Number of ``matches`` by code."""
    last_line: dict[str, int] = field(default_factory=dict)
    recovered: Counter[str] = field(default_factory=Counter)
    warnings: dict[str, Match] = field(default_factory=dict)
    steps: int = 0
    recent_steps: deque[bytes] = field(default_factory=lambda: deque(maxlen=_STEPS_REMEMBERED))
    last_step_time: float | None = None
    last_step: str | None = None
    harmless: deque[int] = field(default_factory=lambda: deque(maxlen=_HARMLESS_REMEMBERED))
    """The last lines with exceptions that did not end their process."""
    start_events: int = 0
    succeeded: bool = False
    first_failure: TorchrunFailure | None = None
    ranks: dict[str | None, set[int]] = field(default_factory=dict)
    """Node → the ranks of its parsed lines."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Names of nodes by their rank, outside of SageMaker."""
    task_hosts: dict[int, str] = field(default_factory=dict)
    """Names of nodes by their Slurm task, of jobs with one task on each node."""
    world_size: int = 0
    nodes: int = 0
    """Of the job's start event; 0 before it."""
    ranks_per_node: int | None = None
    summary: dict[str, str] | None = None
    """The fields of torchrun's summary while it is being read, else None."""
    nccl: dict[str | None, list[str]] = field(default_factory=dict)
    """Node → NCCL's lines about its network."""
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    unfinished: tuple[LogLine, int] | None = None
    """An unknown exception that ends with a colon, and its line: its message may follow."""
    handled: Match | None = None
    """The exception during whose handling another one is being raised."""
    tail: bytes = b""
    block: bytes = b""
    line_start: int = 0
    """Offset of the current line in the block."""

    # -------------------------------------------------------------- blocks

    def scan_block(self, block: bytes) -> None:
        """Scan a block of whole lines, jumping from one line of interest to the next."""
        if self.line_number == 0:
            self.tracebacks.learn_common_prefix(block)
            self._open_truncated_traceback(block)
        self._read_node_names(block)
        self.block = block
        position, end = 0, len(block)
        while position < end:
            start = position
            # Inside a traceback or summary every line counts; otherwise skip to the next one.
            if not (self.tracebacks.open or self.summary is not None or self.unfinished):
                found = searched_pattern().search(block, position)
                if found is None:
                    self._skip_lines(position, end)
                    break
                start = block.rfind(b"\n", position, found.start()) + 1 or position
                self._skip_lines(position, start)
            stop = block.find(b"\n", start)
            self._scan_line(start, stop)
            position = stop + 1
        self._update_last_step_time()
        self.tail = (
            (self.tail + block)[-_TAIL_BYTES:] if len(block) < _TAIL_BYTES else block[-_TAIL_BYTES:]
        )

    def _read_node_names(self, block: bytes) -> None:
        if _NODE_START.encode() not in block:
            return
        for task, rank, name in (match.groups() for match in _NODE_STARTED.finditer(block)):
            self.hosts[int(rank)] = name.decode("utf-8", "replace")
            if task is not None:
                self.task_hosts[int(task)] = self.hosts[int(rank)]

    def _node_name(self, rank: int) -> str:
        return self.hosts.get(rank) or host_name(rank, self.nodes)

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
        for step in _step_pattern().finditer(self.block, start, stop):
            self._count_step(step, first, start)
            if not self.matches:
                return

    def _count_step(self, step_match: _BytesMatch, number: int, start: int) -> None:
        """Count a step once, however many ranks log it, and remove matches that it outlived.

        ``number`` is that of the line at the offset ``start``, at or before the step.
        """
        step = _step_in(step_match)
        # Bars of other ranks that still load the model or data are no progress of the training.
        if step in self.recent_steps or _LOADING.search(step) is not None:
            return
        self.recent_steps.append(step)
        if _UNFINISHED_BAR.search(step):
            line = number + self.block.count(b"\n", start, step_match.start())
            if line - self.matches[-1].order <= _REDRAWN_LINES:
                return
        self.steps += 1
        # Matches are ordered by steps_before, so the outlived ones come first.
        outlived = bisect_right(
            self.matches, self.steps - STEPS_TO_RECOVER, key=lambda match: match.steps_before
        )
        self._mark_recovered(outlived)

    def _mark_recovered(self, count: int) -> None:
        """Remove the first ``count`` matches: they did not end the job."""
        codes = Counter(match.code for match in self.matches[:count])
        self.recovered += codes
        self.harmless.extend(match.order for match in self.matches[:count])
        self.per_code -= codes
        del self.matches[:count]

    def _remember_steps(self) -> None:
        """Remember the last steps up to the current line, so that a repeated one is no progress."""
        end = self.block.find(b"\n", self.line_start)
        start = max(0, self.line_start - _STEP_LOOK_BACK_BYTES)
        for step_match in _step_pattern().finditer(self.block, start, end):
            self.recent_steps.append(_step_in(step_match))

    def _update_last_step_time(self) -> None:
        """Store the approximate time of the last step, for matches on nodes that log no steps."""
        start = self.block.rfind(b"\n", 0, max(0, len(self.block) - _LOOK_BACK_BYTES)) + 1
        last = None
        for step_match in _step_pattern().finditer(self.block, start):
            last = step_match
        if last is not None:
            begin = self.block.rfind(b"\n", 0, last.start()) + 1
            line = self._parse(self.block[begin : self.block.find(b"\n", begin)])
            self.last_step_time = _time_of(line) or self.last_step_time
            self.last_step = _step_in(last).decode("utf-8", "replace").split("|")[-1].strip(" :[")

    # -------------------------------------------------------------- lines

    def _parse(self, raw: bytes) -> LogLine:
        text = raw[:_MAX_LINE_BYTES].decode("utf-8", "replace")
        line = parse_line(text, self.stream.reference, self.tracebacks.prefixes)
        if line.node is None and line.task in self.task_hosts:
            # The task is a node's, not a rank's.
            return replace(line, node=self.task_hosts[line.task], task=None)
        return line

    def _scan_line(self, start: int, stop: int) -> None:
        self.line_number += 1
        self.line_start = start
        if self.matches and (step := _step_pattern().search(self.block, start, stop)):
            self._count_step(step, self.line_number, start)
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
        if line.rank is not None:
            self.ranks.setdefault(line.node or self.stream.node, set()).add(line.rank)
        if self.summary is not None and self._read_summary(line):
            return
        if self.unfinished is not None and self._finish_exception(line):
            return
        if any(text in line.text for text in CHAINED):
            self._remove_chained(line)
        if any(text in line.text for text in NCCL_LITERALS):
            lines = self.nccl.setdefault(line.node or self.stream.node, [])
            lines += [line.text] if len(lines) < _MAX_NCCL_LINES else []
        if _COMMUNICATOR in line.text and (size := _COMMUNICATOR_SIZE.search(line.text)):
            self.world_size = max(self.world_size, int(size[1]))
        event = parse_event(line.text) if "SMT {" in line.text else None
        part = "other" if event else self.tracebacks.feed(line, self.line_number)
        if event is not None:
            self._match_event(event, line)
        elif part == "exception":
            self._match_exception(replace(line, text=line.text.lstrip()))
        elif part == "harmless":
            self.harmless.append(self.line_number)
        elif any(text in line.text for text in _FIRST_FAILURE):
            self.summary = {_LAUNCHER: line.node or ""}
        elif any(text in line.text for text in SUCCESS) and not is_input_or_source(line.text):
            self._mark_recovered(len(self.matches))
            self.succeeded = True
        elif part == "other":
            self._match_message(line)

    def _attributed(self, event: Event, line: LogLine) -> LogLine:
        """Attribute an event to the rank it is about, which is seldom the one that reports it."""
        rank, node = event.get("blamed_rank", event.get("rank_died")), event.get("blamed_node")
        if rank is None and node is None:
            return line
        return replace(line, rank=rank, node=line.node if node is None else self._node_name(node))

    def _match_event(self, event: Event, line: LogLine) -> None:
        """Match one of this project's events, whose node, rank and time are exact."""
        node = line.node or self.stream.node or line.host or self._node_name(event["node"])
        line = replace(line, rank=event["rank"], time=event["time"], node=node)
        if event["kind"] == "start":
            # A second start in one log is another attempt of the same job.
            if self.start_events:
                self._mark_recovered(len(self.matches))
            self.start_events += 1
            self.nodes, self.world_size = event["nodes"], event["world_size"]
            self.ranks_per_node = event["world_size"] // max(1, event["nodes"])
        elif event["kind"] == "end" and event["reason"] == "done":
            self._mark_recovered(len(self.matches))
            self.succeeded = True
        elif event.get("code") == _STALL_RESOLVED:
            self._remove(_STALL)
        elif event["kind"] == "error" and event["code"] != _STALL:
            text = f"rank {event['rank']} failed: {event['message']}"
            self._match_exception(replace(line, text=text))
        else:
            for signature in matching(line.text):
                self._add(signature.code, signature.role, self._attributed(event, line))

    def _match_message(self, line: LogLine) -> None:
        """Add the signatures of a message, unless it shows that the program continues."""
        for code in {match.code for match in self.matches if is_resolved(match.code, line.text)}:
            self._remove(code)
        signatures = matching(line.text.strip())
        if signatures and all(
            self.per_code[signature.code] >= _MAX_PER_CODE for signature in signatures
        ):
            self.last_line.update((signature.code, self.line_number) for signature in signatures)
            return
        if not signatures or is_input_or_source(line.text):
            return
        harmful = not is_harmless(line.text)
        for signature in signatures:
            if harmful or signature.role == "warning":
                self._add(signature.code, signature.role, line)

    def _match_exception(self, line: LogLine) -> None:
        """Add an exception that ended a process, by its signature or as a program error."""
        handled, self.handled = self.handled, None
        if handled and handled.rank == line.rank and _IN_HANDLER.match(line.text):
            self.matches.append(handled)
            self.per_code[handled.code] += 1
            return
        library = self.tracebacks.library
        signatures = matching_exception(line.text, library)
        for signature in signatures:
            self._add(signature.code, signature.role, line, uncaught=True)
        if not signatures:
            self._add(PROGRAM_ERROR, "exception", line, uncaught=True)
            self.matches[-1] = replace(self.matches[-1], in_library=library is not None)
            if line.text.rstrip().endswith(":"):
                self.unfinished = line, self.line_number
        elif not matching(line.text):
            recent = self.matches[-len(signatures) :]
            self.matches[-len(signatures) :] = [replace(match, loose=True) for match in recent]

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
        last = self.matches[-1] if self.matches else None
        if last is None or last.order != number or begins:
            return False
        if not is_known and begun.text.strip().count(":") > 1:
            return False
        self.matches.pop()
        self.per_code[last.code] -= 1
        self._match_exception(whole)
        return True

    def _add(self, code: str, role: MatchRole, line: LogLine, *, uncaught: bool = False) -> None:
        self.last_line[code] = self.line_number
        is_warning = role == "warning"
        if code in self.warnings if is_warning else self.per_code[code] >= _MAX_PER_CODE:
            return
        match = Match(
            code,
            role,
            self.stream.name,
            self.line_number,
            line.text.strip()[:MAX_TEXT],
            self._time(line),
            line.node or self.stream.node or line.host,
            self.stream.rank if line.rank is None else line.rank,
            line.time is not None,
            self.steps,
            uncaught,
            line.local_rank,
            line.task,
        )
        if is_warning:
            self.warnings[code] = match
        else:
            if not self.matches:
                self._remember_steps()
            self.matches.append(match)
            self.per_code[code] += 1

    def _remove(self, code: str) -> None:
        """Remove all matches of ``code``: their cause is gone."""
        self.recovered[code] += self.per_code.pop(code, 0)
        self.matches = [match for match in self.matches if match.code != code]

    def _remove_chained(self, line: LogLine) -> None:
        """Remove an exception that led to another: the other one ended the process.

        If it is the direct cause of the other one, it remains if its kind is known.
        """
        is_cause = _DIRECT_CAUSE in line.text
        for index in reversed(range(len(self.matches))):
            match = self.matches[index]
            if self.line_number - match.order > _CHAIN_LINES:
                return
            is_known = match.code != PROGRAM_ERROR
            if match.role == "cause" and match.rank == line.rank:
                # It was raised, even if its traceback is cut off.
                self.matches[index] = replace(match, uncaught=True)
                return
            if match.role == "exception" and match.rank == line.rank:
                if is_known and is_cause:
                    return
                del self.matches[index]
                self.per_code[match.code] -= 1
                self.handled = match
                return

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

    def _read_summary(self, line: LogLine) -> bool:
        """Read a line of torchrun's summary of the first failure; return False after its end.

        Its lines are ``[0]:`` and ``name : value``, as ``  rank      : 11 (local_rank: 3)``.
        """
        assert self.summary is not None
        name, colon, value = line.text.partition(":")
        if line.text.strip().startswith("[") or (colon and name.strip() in _SUMMARY_FIELDS):
            self.summary[name.strip()] = value.strip()
            return True
        summary, self.summary = self.summary, None
        rank, exit_code = (_NUMBER.search(summary.get(key, "")) for key in ("rank", "exitcode"))
        stamp = parse_line(summary.get("time", ""), self.stream.reference)
        failure = TorchrunFailure(
            int(rank[0]) if rank else None,
            stamp.time,
            int(exit_code[0]) if exit_code else None,
            summary.get("host"),
            summary[_LAUNCHER] or None,
        )
        # Every node's launcher reports its own first failure: keep the earliest.
        previous = self.first_failure
        if previous is None or (failure.time or 0.0) < (previous.time or 0.0):
            self.first_failure = failure
        code = _SIGNALS.get(failure.exit_code)
        if code is not None:
            text = f"first observed failure: exit code {summary['exitcode']}"
            node = summary.get("host") or None
            self._add(code, "symptom", LogLine(text, failure.time, None, failure.rank, node))
        return False

    # -------------------------------------------------------------- the end

    def report(self) -> ScanReport:
        if self.summary is not None:
            self._read_summary(LogLine(""))
        # The exception that would have replaced it is missing: the log ends before.
        says_more = self.handled is not None and not self.handled.text.endswith(":")
        replaced = (self.handled,) if self.handled and says_more else ()
        found = (*self.matches, *replaced)
        others = of_other_programs(found, lambda: whole_lines(self.stream.blocks()))
        matches = tuple(match for match in found if match not in others)
        return ScanReport(
            stream=self.stream.name,
            node=self.stream.node,
            lines=self.line_number,
            matches=matches,
            other_programs=tuple(others),
            last_line=self.last_line,
            steps=self.steps,
            recovered=dict(self.recovered),
            warnings=tuple(self.warnings.values()),
            last_step_time=self.last_step_time,
            last_step=self.last_step,
            harmless=frozenset((*self.harmless, *(match.order for match in others))),
            succeeded=self.succeeded and not matches,
            first_failure=self.first_failure,
            ranks={node: frozenset(ranks) for node, ranks in self.ranks.items()},
            ranks_per_node=self.ranks_per_node,
            nodes=self.nodes,
            world_size=self.world_size,
            hosts=self.hosts,
            outlived=self._line_before_last_steps(),
            tail=self.tail,
            reference=self.stream.reference,
            prefixes=self.tracebacks.prefixes,
            nccl={node: parse_nccl_log(lines) for node, lines in self.nccl.items()},
        )

    def _line_before_last_steps(self) -> int:
        """Return the number of the line before the last two steps at the end of the log, else 0."""
        lines = self.tail.split(b"\n")[:-1]
        steps: dict[bytes, int] = {}
        for number, line in enumerate(lines, self.line_number - len(lines) + 1):
            if step_match := _step_pattern().search(line):
                steps.setdefault(_step_in(step_match), number)
        return sorted(steps.values())[-_STEPS_AFTER_ERROR] - 1 if len(steps) > 1 else 0


def _time_of(line: LogLine) -> float | None:
    event = parse_event(line.text) if "SMT {" in line.text else None
    return float(event["time"]) if event else line.time


# Negative exit codes of torchrun are signals: SIGKILL, SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE.
_SIGNALS: dict[int | None, str] = {
    -9: "process-killed",
    -11: "segfault",
    -7: "bus-error",
    -6: "aborted",
    -4: "fatal-signal",
    -8: "fatal-signal",
}


_STALL, _STALL_RESOLVED = "stall", "stall-resolved"
"""The codes of the watchdog's events (entrypoints/monitoring/watchdog.py)."""

# A variable that is not set yet when a handler or a finally clause uses it: the exception that it
# handles is the failure.
_IN_HANDLER = re.compile(r"(?:NameError|UnboundLocalError): ")
_LAUNCHER = "launcher"
"""Key of torchrun's summary for the node that printed it; not one of its fields."""
_SUMMARY_FIELDS = {"time", "host", "rank", "exitcode", "error_file", "traceback", "msg"}
_NUMBER = re.compile(r"-?\d+")

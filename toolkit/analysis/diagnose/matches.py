"""The input and the result of scanning a log: streams, matched lines and the report of a scan."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from sm_train.entrypoints.distributed.nccl_log import NcclLog
from sm_train.toolkit.analysis.diagnose.log_lines import Prefixes, parse_line
from sm_train.toolkit.analysis.diagnose.signatures import (
    matching,
    matching_at_end,
    matching_exception,
)
from sm_train.toolkit.analysis.diagnose.watchdog_lines import CollectiveTimeout

MAX_TEXT = 500
"""Characters kept of a line."""
PROGRAM_ERROR = "program-error"
"""The code of an exception that ended a process and matches no signature. The kinds of exceptions
in ``program_errors.toml`` are its subcauses."""

STEPS_TO_RECOVER = 3
"""Further steps that show that the job recovered; other ranks may log one or two late."""
OPEN_MPI = "mpi-error"
"""The code of a message of Open MPI that matches no signature."""

_TAIL_LINES = 400
_OPEN_MPI_FRAME = "-" * 74
_OPEN_MPI_LINES = 60
_OPEN_MPI_WARNING = re.compile(
    r"^WARNING|\bthis (?:warning|is only a warning)|\bwarning only|will continue|deprecated"
    r"|instead|ignored|[Ff]alling back|performance|not recommended|harmless",
)
# Lines of launchers' final reports, which repeat earlier errors.
_LAUNCHERS = re.compile(
    r"\bError executing job with overrides|ChildFailedError|Root Cause|(?i:FAILED with no error)"
    r"|^(?:[=-]{8,}|Failures:|error_file)"
)
_ERROR_WORDS = re.compile(
    r"\b(?:[A-Z]\w*Error|(?:[A-Z]\w*)?Exception|ERROR|FATAL|FAILED|CRITICAL|[Ee]rror"
    r"|(?i:failed|fails|failure)|[Ff]atal|[Aa]bort(?:ed|ing)?|panic|Killed|killed|core dumped"
    r"|NCCL WARN|[Cc]annot|[Cc]ould(?: not|n't)|[Uu]nable to|[Cc]an't|not found|unavailable|denied"
    r"|refused|No valid|not (?:enough|having))\b"
    r"|\[Errno \d+\]"
)
_BAD_LEVEL = re.compile(rb"\b(?:ERROR|FATAL|CRITICAL)\b")
_LEVEL_BYTES = 120
# "RuntimeError: …" at the start of a line, "AssertionError:" alone, "click.exceptions.Abort: …"
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)|Exception|StopIteration)(?:\(\w+\))?"
    r"(?:: \S|(?<!Exception):?$(?<!Exception:))"
    r"|[a-z_]\w*(?:\.[a-z_]\w*)*\.(?:[A-Z]\w*[a-z]|error|timeout|gaierror): \S"
)
# The type of an exception whose message starts on the next line
_ONLY_TYPE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception):$")
_LOGGED = re.compile(
    r"(?i:\b(?:retry|ignor|skipp|fall(?:ing|s) back|caught)|attempt \d"
    r"|\b(?:potential|possible) (?:root )?(?:cause|reason)s\b)"
)
_END_LINES = 10
# A progress bar of training steps at its end, and what shows that it is not of something else:
#   Epoch 9: 100%|██████████| 500/500 [01:01<00:00,  8.15it/s, loss=0.12]
#   Steps: 100%|██████████| 1752/1752 [1:26:51<00:00,  2.97s/it]
_LAST_BAR = re.compile(r"([^\r\n|]{0,100}?)100%\|[^|\r\n]*\| +(\d+)/(\d+) \[\d+:[^\]\r\n]*\]")
#   [pod/train-worker-1/pytorch] Loading checkpoint shards: 100%|██████████| 2/2 [00:03<00:00, …]
_STEP_BAR = re.compile(
    r"(?i:\b(?<![-/])(?:step|epoch|train|iter)\w*\b)(?![-/])(?!.*(?i:load|map|token))[^|\]]*$"
)
_STEP_VALUES = re.compile(r"(?i:loss|\blr\b)\w*=")
_COMPLETION_BYTES = 4096


def all_steps_done(tail: str) -> bool:
    """Return whether the end of a log shows a training's progress bar at its last step."""
    end = tail[-_COMPLETION_BYTES:]
    bars = list(_LAST_BAR.finditer(end)) if "100%|" in end else []
    if not bars or _ERROR_WORDS.search(end, bars[-1].end()):
        return False
    name, done, total = bars[-1].groups()
    is_training = _STEP_BAR.search(name) or _STEP_VALUES.search(bars[-1][0])
    return done == total and int(total) > 1 and bool(is_training)


# Text that the program received or consists of instead of something that happened to it:
#   SM_HPS={"caption":"CUDA out of memory", …                          SageMaker's environment
#   Namespace(nccl_timeout=1800, …                                     parsed arguments
#   hyperparameters: {"note": "OSError: …"}                            configuration
#   sampled prompt: "a t-shirt that says RuntimeError: …"              samples of the data set
#       raise RuntimeError("CUDA error: …"), print("…"), │ ❱ 88 …      source lines of a traceback
#   frame #0: c10::Error::Error(…) + 0x57 (0x7fa3 in …/libc10.so)      C++ stacks
_INPUT_OR_SOURCE = re.compile(
    r"""^\s*(?:SM_[A-Z_]+=|Namespace\()|^\s*[\w.]*(?:caption|prompt|hyperparameter)s?\b.{0,40}[:=]"""
    r"""|["'\s](?:caption|prompt|text|alt)s?["']?\s?[:=]\s?["']"""
    r"""|^\s*(?:raise|return|assert|except|from|import|with|def|class|#)\s"""
    r"""|^frame #\d+: |^\s+(?:if|print|logger|log)\b"""
    r"""|^(?:print|logg(?:er|ing)\.\w+)\(|^\s*[│|>❱]|^\s*File \"""",
    re.IGNORECASE,
)
# A message which itself shows that the program continues:
#   2026-11-21 10:00:00 WARNING …, DEBUG retry 1 after …               a log level below error
#   [W1121 10:00:21.412354 socket.cpp:601] …                           PyTorch's warnings
#   level=warning msg="…", {"level": "info", …}                       structured loggers
#   UserWarning: …, Warning: …                                         Python's warnings
#   … NCCL WARN Failed to open libibverbs.so[.1]                       no InfiniBand on this node
#   … retrying in 5 s, … ignored, … skipping, … falling back to …
#   Uncorrectable Error: 0, no errors, Non-fatal, Link 46 …, 1 CE memory read error …
_HARMLESS = re.compile(
    r"^<(?:debug|info|warning)>|^.{0,100}?(?<![=\w])(?:DEBUG|INFO|WARNING)\b|\blevel=\"?(?:debug|info|warn(?:ing)?)\b"
    r"|\"(?:level|severity)\": ?\"(?i:debug|info|warn(?:ing)?)\"|^\[?W(?:\d{3,4} \d\d:| \w+\.cpp)"
    r"|\b\w+Warning: |^Warning: |\bset by environment\b|NCCL WARN Failed to open libibverbs"
    r"|(?i:\b(?:errors?|failures?)\b[\w ]{0,20}[:=] ?(?:0|none)\b(?! in\b))"
    r"|(?i:\b(?:0|no) (?:errors|failures)\b)"
    r"|(?i:\b(?:retrying|will (?:retry|ignore)|(?:ignor|skipp)(?:ed|ing)|fall(?:ing|s) back)\b)"
    r"|\b[Nn]on-?fatal\b|\b[Cc]orrected error|^EDAC \S+: \d+ CE "
)
# Messages that count even if they look harmless:
#   NVRM: Xid (PCI:0000:06:00): 79, …                                  the GPU driver
#   Memory cgroup out of memory: Killed process 1203 (python3) …       the kernel
#   W1122 … Sending process 1200 closing signal SIGTERM, … death signal …   torchrun
#   Insufficient capacity error from EC2 …, SecondaryStatus: …, FailureReason: …   SageMaker
#   WARNING: loss is nan, WARNING: …, ending training
_NEVER_HARMLESS = re.compile(
    r"NVRM: |\btraps: \S+\[\d+\]|INFO: (?:task \S+ blocked for|rcu_)|Killed process"
    r"|death signal|signal SIGTERM"
    r"|Insufficient capacity error from EC2"
    r"|(?i:\b(?:ending|stopping|aborting|terminating) (?:the )?(?:training|run|job)\b)"
    r"|^(?:SecondaryStatus|FailureReason): |\bloss\b.*\b(?:nan|NaN|inf)\b"
)


def is_input_or_source(text: str) -> bool:
    """Return whether a line shows what the program received or consists of, not what happened."""
    return _INPUT_OR_SOURCE.search(text) is not None


def is_harmless(text: str) -> bool:
    """Return whether a message itself shows that the program continues."""
    return _HARMLESS.search(text) is not None and _NEVER_HARMLESS.search(text) is None


def shows_continuation(text: str) -> bool:
    """Return whether a message is about an error that was caught, or only a possible one."""
    return _LOGGED.search(text) is not None


MatchRole = Literal["cause", "exception", "symptom", "echo", "warning"]


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
    local_rank: int | None = None
    task: int | None = None
    """The number that `srun -l` writes before the line."""
    in_library: bool = False
    """Whether an exception was raised in an installed library."""
    loose: bool = False
    """Whether only a mention in an exception, or the library that raised it, shows the cause."""


@dataclass(frozen=True)
class TorchrunFailure:
    """The "first observed failure" of torchrun's summary; ``node`` is the launcher that printed it,
    in a log of several nodes.
    """

    rank: int | None
    time: float | None
    exit_code: int | None
    host: str | None = None
    node: str | None = None


@dataclass(frozen=True)
class ScanReport:
    """The result of scanning one stream. ``matches`` are those after which training stopped."""

    stream: str
    node: str | None
    lines: int
    matches: tuple[Match, ...]
    other_programs: tuple[Match, ...]
    """Messages of the kernel about programs other than the job's."""
    last_line: dict[str, int]
    """Code → line number of its last match; ``matches`` keeps only the first ones of a code."""
    steps: int
    """Training steps; they are counted only while there are matches they may supersede."""
    recovered: dict[str, int]
    """Code → number of matches after which training continued."""
    warnings: tuple[Match, ...]
    last_step_time: float | None
    last_step: str | None
    """The progress that the last step logged, such as ``1752/1752``."""
    harmless: frozenset[int]
    """Line numbers of the last exceptions that did not end their process."""
    succeeded: bool
    first_failure: TorchrunFailure | None
    ranks: dict[str | None, frozenset[int]]
    """Node → the ranks of the lines that were parsed."""
    ranks_per_node: int | None
    nodes: int
    """The nodes that the job's start event states; 0 if the log has none."""
    world_size: int
    """Ranks of the job, by its start event or NCCL's largest communicator; 0 if unknown."""
    hosts: dict[int, str]
    """Names of nodes by their rank, outside of SageMaker."""
    outlived: int
    """The number of the line after which training continued for two steps, 0 if it did not."""
    tail: bytes
    reference: float
    prefixes: Prefixes
    """Prefixes that were learned from the log."""
    nccl: dict[str | None, NcclLog]
    """Node → what NCCL reports of its network."""
    timeouts: tuple[CollectiveTimeout, ...]
    """Collectives that timed out, in the order of their lines."""

    @property
    def completed(self) -> bool:
        """Whether the log ends with the last step of the training."""
        return self.succeeded or all_steps_done(self.tail.decode("utf-8", "replace"))

    def last_error(self) -> Match | None:
        """Return the error which the log ends with, though without a traceback.

        An exception counts even if no signature matches it, any other line only if one does.
        """
        handled = self.harmless | {match.order for match in self.matches}
        if message := _open_mpi_message(self._tail_lines[-_OPEN_MPI_LINES:]):
            return message if message.order > self.outlived else None
        for line in reversed(self.last_lines()[-_END_LINES:]):
            is_exception = _EXCEPTION.match(line.text) is not None
            if (
                line.order <= self.outlived
                or line.order in handled
                or shows_continuation(line.text)
                or (matching(line.text) and not line.uncaught)
            ):
                continue
            writer = None if is_exception or is_harmless(line.text) else matching_at_end(line.text)
            if writer is not None:
                return replace(line, code=writer.code, role="symptom")
            is_error = line.role == "symptom" and not is_harmless(line.text)
            if is_exception or (is_error and not is_input_or_source(line.text)):
                # Without its type, an error is compared like the message of an exception.
                text = line.text if is_exception else f"Error: {line.text}"
                found = matching_exception(line.text) or matching_exception(text)
                if found and found[0].role not in ("echo", "warning"):
                    return replace(line, code=found[0].code, role=found[0].role)
            if is_exception:
                return replace(line, code=PROGRAM_ERROR, role="exception")
        return None

    def last_lines(self) -> list[Match]:
        """Return the last lines except events; lines that look like errors are symptoms."""
        return [line for line in self._tail_lines if not _LAUNCHERS.search(line.text)]

    def is_error(self, line: Match) -> bool:
        """Return whether one of the last lines reports an error that may have ended the program."""
        return (
            line.role == "symptom"
            and line.order not in self.harmless
            and not is_harmless(line.text)
            and not is_input_or_source(line.text)
        )

    @cached_property
    def _tail_lines(self) -> list[Match]:
        lines = self.tail.split(b"\n")[:-1][-_TAIL_LINES:]
        # A level shows an error unless a program gives it to all of its output.
        levels = [_BAD_LEVEL.search(raw[:_LEVEL_BYTES]) is not None for raw in lines]
        has_levels = sum(levels) < max(2, len(lines) / 2)
        matches: list[Match] = []
        for index, raw in enumerate(lines):
            number = self.lines - len(lines) + 1 + index
            if b"SMT {" in raw:
                continue
            written = raw.decode("utf-8", "replace")
            line = parse_line(written, self.reference, self.prefixes)
            if not (text := line.text.strip()[:MAX_TEXT]):
                continue
            if matches and _ONLY_TYPE.fullmatch(matches[-1].text):
                text = f"{matches[-1].text} {text}"
                matches[-1] = replace(matches[-1], text=text, role="symptom", uncaught=True)
                continue
            is_error = _ERROR_WORDS.search(text) or (has_levels and levels[index])
            role: MatchRole = "symptom" if is_error else "warning"
            node = line.node or self.node
            match = Match("", role, self.stream, number, text, line.time, node, line.rank)
            # The scan looks for literals in the lines as they are written.
            matches.append(replace(match, uncaught=text not in written))
        return matches


def _open_mpi_message(lines: list[Match]) -> Match | None:
    """Return the message of Open MPI at the end of a log, None if it is no error.

    Open MPI and PRRTE put every help text between two lines of 74 dashes.
    """
    frame = [number for number, line in enumerate(lines) if line.text == _OPEN_MPI_FRAME]
    if len(frame) < 2:
        return None
    inside = lines[frame[-2] + 1 : frame[-1]]
    text = " ".join(line.text for line in inside)
    if not inside or _OPEN_MPI_WARNING.search(text) or any(matching(line.text) for line in inside):
        return None
    return replace(inside[0], code=OPEN_MPI, role="symptom", text=text[:MAX_TEXT])

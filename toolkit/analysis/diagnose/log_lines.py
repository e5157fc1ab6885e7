"""Parses one line of a job's log: its time, node, rank and message."""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from sm_train.toolkit.terminal.formatting import without_sequences

# " 50%|x | 5/10\r100%|x | 10/10": a terminal shows only the text after the last carriage return,
# which CloudWatch writes as "#015".
_LAST_RETURN = re.compile(r"^.*(?:\r|#015)(?=.)")
# "  5%|▌    | 72/1398 [1:12:34<24:31:08, 66.57s/it]RuntimeError: …": a message after a tqdm bar
_PROGRESS_BAR = re.compile(r"^.*?\d+%\|[^|]*\| [^\]]*\](?=\S)")
# "45/100 [====>....] - ETA: 1:20 - loss: 0.34Killed": the shell's message after another bar
_SHELL_ENDINGS = ("Killed", "Terminated", "Aborted", "Bus error", "Segmentation fault", " dumped)")
_OTHER_BAR = re.compile(
    r"^.*?\[[=>.# -]{3,}\].*?\b(?:eta|ETA):? .*?"
    r"(?=(?:Killed|Terminated|Aborted|Bus error|Segmentation fault)(?: +\(core dumped\))?$)"
)

# 2026-11-21T10:00:00.250Z, 2026-11-21 10:00:00,250, 2026/11/21 10:00:00, 2026-11-22_08:01:41
_TIME = r"\d{4}[-/]\d\d[-/]\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_BAD = "ERROR|CRITICAL|FATAL"
"""Levels that are removed from a line; lower ones stay, because they show a harmless message."""


def _compiled(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, patterns))


# Prefixes that launchers, runtimes and log viewers put before a message, in any order and number,
# by the kind of their first character. Others are learned from the line that opens a traceback.
_DATE = (
    # "2026-11-21 10:00:00,250 - …", "[2026-11-21 10:00:00] …", "  | 2026-11-21T10:00:00Z | …";
    # TensorFlow and XLA: "2026-11-21 10:00:00.250000: E xla/cuda_driver.cc:1234] …"
    rf"(?:\s*\|\s*(?=\d))?\[?(?P<time>{_TIME})\]?"
    r"(?:: [EF] [\w./-]+:\d+\] |(?::(?! [IW] )|,? -)?(?:\s*\|)?\s?)"
)
# "10:00:00 …", "[10:00:00.250]: …", "10:00:00,250 | …": no date
_CLOCK = r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?:?(?: [|-])?\s?"
_HOST = r"(?!rank|step|epoch|iter|nvidia|slurm)[a-z][\w.]*-[\w.-]*\d"
"""A machine's or pod's name with a number, but not "step-3" or "nvidia-nvswitch0"."""
# `srun -l`: "105: …", padded to the width of the largest task
_TASK = r" *(?P<task>\d{1,5}): "
_AFTER_DIGIT = _compiled(
    _DATE,
    # "10.0.1.5: …": pdsh and DeepSpeed
    r"(?P<host>\d+\.\d+\.\d+\.\d+): ",
    _TASK,
    _CLOCK,
)
_AFTER_SPACE = _compiled(_DATE, _TASK)
# A box of a terminal program, as k9s: "│ train-worker-1:73:95 [0] …". Boxes of rich tracebacks with
# source lines, frames and variables stay: "│ ❱ 88 │   main()", "│ /opt/ml/code/train.py:88 in main"
_AFTER_BOX = _compiled(
    r"│ (?=\S)(?!\d+ │|[❱│╭╰/~]|[A-Za-z]:\\|.*:\d+ in \S|in \S+:\d)"
    r"(?=[\w.-]+:\d+:\d+ \[|.{20})"
)
_BOX_END = re.compile(r"\s+│$")
# "ValueError:Network outputs is NaN", '"GatedRepoError: 401 …"', "`RuntimeError: …"
_EXCEPTION_START = re.compile(
    r"^[\"'`]?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)):(?: (?=\S)|(?=[^\s:]))"
)
_LOWER_CASE = re.compile(r"^\s*([a-z]{2,40}error): (?=\S)")
_BUILT_IN = {name.lower(): name for name in dir(builtins) if name.endswith("Error")}
# A debugger: "Exception has occurred: AttributeError", then the message
_DEBUGGER = re.compile(r"^Exception has occurred: ([\w.]+)(?:\s*\(note: .*\))?$")
_AFTER_BRACKET = _compiled(
    _DATE,
    _CLOCK,
    # Airflow 2: "[2026-11-21, 10:00:00 UTC] …"
    r"\[\d{4}-\d\d-\d\d, \d\d:\d\d:\d\d [A-Z]{3,4}\] ",
    # Hydra, after the time: "[__main__][ERROR] - …"
    rf"(?:\[[\w.]+\])?\[(?:{_BAD})\] - ",
    # PyTorch: "[rank3]: Traceback …", "[rank3]:[E321 02:07:08 …"; Lightning: "[rank: 3] …"
    r"\[rank(?P<rank>\d+)\]:(?: |(?=\[))",
    r"\[rank: (?P<local_rank>\d+)\] (?=Child process)",
    r"\[rank: (?P<rank>\d+)\] ",
    # mpirun on SageMaker: "[1,mpirank:3,algo-2]<stderr>:…"
    r"\[1,mpirank:(?P<rank>\d+),(?P<node>algo-\d+)\]<std(?:err|out)>:",
    # mpirun --tag-output: "[1,15]<stdout>:…"; Open MPI 5: "[prterun-host-12@1,15]<stdout>: …"
    r"\[(?:1,)?(?P<rank>\d+)\]<std(?:err|out)>:",
    r"\[[\w.-]+@\d+,(?P<rank>\d+)\]<std(?:err|out)>: ?",
    # torchrun --tee, with the role's name and the local rank: "[default3]:…", "[trainer3]:…"
    r"\[[A-Za-z_][\w-]*?(?P<local_rank>\d+)\]: ?",
    # kubectl logs --prefix: "[pod/train-worker-1/pytorch] …"
    r"\[pod/(?P<host>[\w.-]+)/[\w.-]+\] ",
    # Skaffold and others: "[train-worker-1] …"
    rf"\[(?P<host>{_HOST})\] ",
    # DeepSpeed: "[ERROR] [launch.py:434:sigkill_handler] …"
    rf"\[(?:{_BAD})\] (?:\[[\w.]+:\d+:\w+\] )?",
    # dmesg: "[18026.221140] NVRM: …", "[ 130.456250] [ T1946] NVRM: …", dmesg --ctime
    r"\[ *\d+\.\d+\] (?:\[ *T\d+\] )?",
    r"\[[A-Z][a-z]{2} (?P<ctime>[A-Z][a-z]{2} [ \d]?\d \d\d:\d\d:\d\d \d{4})\] ",
)
# Airflow, which logs all that a task writes at this level: "{subprocess.py:93} INFO - …"
_AFTER_BRACE = _compiled(rf"\{{[\w.]+\.py:\d+\}} (?:INFO|{_BAD}) - (?:\[base\] )?")
# Ray: "(train_func pid=1203, ip=10.0.1.5) …", "(raylet) …"
_AFTER_PARENTHESIS = _compiled(
    r"\((?:[\w.]+ )?(?P<label>pid=\d+)(?:, ip=(?P<host>[\d.]+))?\) ", r"\(raylet(?:, ip=[\d.]+)?\) "
)
_AFTER_LETTER = _compiled(
    # `aws logs tail`: "my-job/algo-2-1700000000 …"; docker compose: "algo-2-abc12  | …"
    r"(?:[\w.-]+/)?(?P<node>algo-\d+)(?:-\w+)?(?:\s*\|\s?| |: )",
    # Kubernetes CRI, after the time: "stderr F …"
    r"std(?:out|err) [FP] ",
    # torchrun's role prefix of some launchers: "trainer/0 [1]:…"
    r"[\w-]+/\d+ \[(?P<local_rank>\d+)\]:",
    # syslog: "Nov 21 10:00:00 ip-10-0-1-5 kernel: …", with a process: "… python[120]: …"
    r"(?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) (?P<host>\S+) (?:[\w./@-]+\[\d+\]: )?",
    # logging: "ERROR:root:…", "trainer - ERROR - …"; loguru: "ERROR    | __main__:train:88 - …"
    rf"(?:{_BAD}):[\w.]+:(?! )",
    rf"(?:[\w.-]+ - ){{0,2}}(?:{_BAD}) - (?:[\w.]+ - )?",
    rf"(?:{_BAD}) +\| (?:[\w.<>]+:[\w<>]+:\d+ - |\w+ \| )?",
    # SageMaker's launcher: 'ErrorMessage "ModuleNotFoundError: …"'
    r'ErrorMessage "(?=\w+(?:\.\w+)*(?:Error|Exception): )',
    # "dinov2-node-4 [stderr] …"
    r"(?P<host>[\w.-]+) \[std(?:err|out)\] ",
    # pdsh with host names: "gpu-node-3: …"; docker compose: "trainer-1  | …"
    rf"(?P<host>{_HOST})(?:: | +\| )",
    # Accelerate's tests: "stderr: …"
    r"std(?:err|out): ",
)
# PyTorch: "[E321 02:07:08.408271257 File.cpp:607]" in C++, "E0321 02:07:08.408000 …" in Python
_C10 = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d(?:\.\d{1,6})?)")
_C10_ERROR = re.compile(r"E\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] ")
"""The whole prefix in Python. It is removed from errors only: a warning shows by its letter."""
# NCCL: "algo-3:40:90 [2] NCCL INFO …", with the host name, process, thread and local GPU
_NCCL = re.compile(r"(?:(algo-\d+)|([\w.-]+)):\d+:\d+ \[\d+\] ")
# "[rank 5]", "[rank5]:", "[RANK 5]", "[PG ID 0 PG GUID 0 Rank 5]", "rank 5 failed: ",
# "process rank 5 ", "Rank 6: ", "Rank 6 crashed with", "Rank 6 failed to pass", '{…"rank": 3}',
# "failed on rank 3", "Unexpected result nan on rank 3"
_RANK = re.compile(
    r"\[(?:[Rr]ank|RANK)[ :=]?(\d+)\]|\bPG [^\]]*Rank (\d+)\]|\brank (\d+) failed: "
    r"|process rank (\d+) |^\W{0,3}[Rr]ank[ :=]{1,2}(\d+)(?:\b(?=[^ ]| ?:)| (?=crashed with))"
    r"|\bRank (\d+) failed to pass|^\{.*\"rank\": ?(\d+)|\b[Gg]lobal rank (\d+) "
    r"|^Container rank (\d+) status|barrier on rank: (\d+),"
    r"|\bgrad for rank (\d+)"
    r"|\b(?:result \w+|[Ee]rror|[Ff]ailed|[Ee]xception|[Cc]rashed) on rank (\d+)\b"
)
# torchrun: "failed (exitcode: -9) local_rank: 3 (pid: 1203)", "local_rank 1 FAILED with";
# torch.multiprocessing: "process 3 terminated with signal SIGKILL"
_LOCAL_RANK = re.compile(
    r"failed \(exitcode: -?\d+\) local_rank: (\d+)|\blocal_rank (\d+) FAILED"
    r"|\b[Pp]rocess (\d+) terminated with (?:signal|exit code|the following error)"
)
# '{"ts": "2026-11-21T10:00:00Z", …}': structured logs
_JSON_TIME = re.compile(rf'^\{{.*"(?:ts|time|@?timestamp)": ?"({_TIME})"')
# mpirun: "mpirun noticed that process rank 3 with PID 120 on node algo-2 exited on signal 9";
# SLURM: "srun: error: node-3: task 12: Killed"
_NODE_IN_TEXT = re.compile(r"on node (\S+) exited|^srun: error: (\S+): tasks? ")
_TASK_IN_TEXT = re.compile(r"^srun: error: \S+: task (\d+): ")
_ALGO = re.compile(r"algo-\d+")
_RANK_IN_PREFIX = re.compile(r"(?<![A-Za-z_])rank[ _:=-]{0,2}(\d+)", re.IGNORECASE)
# "train-worker-1 pytorch ": a machine's or pod's name in a prefix
_HOST_IN_PREFIX = re.compile(r"\b([a-z][\w.]*-[\w.-]*\d[\w.-]*)")
_LEVEL = re.compile(r"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)")
# "10:00:00.250", "1700000000": differs from line to line, unlike "pod-3" or "3:"
_CHANGES = re.compile(r"\d+(?:[:.,]\d+)+|\d{9,}")


@dataclass(frozen=True)
class LogLine:
    """A parsed line; ``time`` is in Unix seconds, and fields the line does not contain are None.

    ``text`` is the message without prefixes and terminal codes; its indentation is kept. ``host``
    is a name of the machine or pod other than SageMaker's ``algo-N``; ``task`` is the number that
    `srun -l` writes; ``label`` is any other text that identifies the process.
    """

    text: str
    time: float | None = None
    node: str | None = None
    rank: int | None = None
    host: str | None = None
    local_rank: int | None = None
    task: int | None = None
    label: str = ""

    @property
    def source(self) -> Source:
        """Lines of one source belong together even if others are between."""
        # A label that was learned contains the host.
        host = None if self.label else self.host
        return self.node, self.rank, host, self.local_rank, self.task, self.label


Source = tuple[str | None, int | None, str | None, int | None, int | None, str]
"""Node, rank, host, local rank, task and label."""


@dataclass
class Prefixes:
    """Prefixes of a log's lines that other lines reveal: one of all lines, and further ones."""

    common: re.Pattern[str] | None = None
    further: list[re.Pattern[str]] = field(default_factory=list)


def prefix_pattern(prefix: str) -> re.Pattern[str]:
    """Return a pattern of ``prefix`` on other lines, where its numbers and level may differ."""
    parts = []
    position = 0
    body = prefix.rstrip(" ")
    for token in re.finditer(rf"{_LEVEL.pattern} *|\d+| +", body):
        parts.append(re.escape(body[position : token.start()]))
        text = token[0]
        # Levels are often padded with spaces.
        level = _LEVEL.pattern + (" +" if text.endswith(" ") else "")
        parts.append(r"\d+" if text.isdigit() else " +" if text.isspace() else level)
        position = token.end()
    parts.append(re.escape(body[position:]))
    # The message's indentation follows, so that the prefix' own spaces are exact.
    return re.compile("".join(parts) + " " * (len(prefix) - len(body)))


def parse_line(line: str, reference: float, learned: Prefixes | None = None) -> LogLine:
    """Parse ``line``, of whose ``learned`` prefixes the common one and one further are removed.

    Times without a zone are UTC, as in AWS's containers. Times without a year belong to the latest
    year in which they are not after ``reference`` (Unix seconds).
    """
    text = line.rstrip("\r\n")
    if "\x1b" in text or "\x9b" in text:
        text = without_sequences(text)
    if "\r" in text or "#015" in text:
        text = _LAST_RETURN.sub("", text)
    if "%|" in text:
        text = _PROGRESS_BAR.sub("", text)
    if text.endswith("│"):
        text = _BOX_END.sub("", text)
    if text.endswith(_SHELL_ENDINGS):
        text = _OTHER_BAR.sub("", text)
    parsed = _strip_prefixes(LogLine(text), reference)
    if learned is not None:
        for patterns in ([learned.common] if learned.common else [], learned.further):
            matches = (pattern.match(parsed.text) for pattern in patterns)
            if match := next(filter(None, matches), None):
                parsed = _strip_prefixes(_without_learned(parsed, match), reference)
    return _read_message(_with_plain_exception(parsed), reference)


def _with_plain_exception(parsed: LogLine) -> LogLine:
    """Write an exception as Python does: its type, a colon, a space and the message."""
    text = parsed.text
    if "rror:" not in text and "Exception" not in text:
        return parsed
    if (lower := _LOWER_CASE.match(text)) and lower[1] in _BUILT_IN:
        text = _BUILT_IN[lower[1]] + text[lower.end(1) :]
    text = _EXCEPTION_START.sub(r"\1: ", _DEBUGGER.sub(r"\1:", text))
    return parsed if text == parsed.text else replace(parsed, text=text)


def _read_message(parsed: LogLine, reference: float) -> LogLine:
    """Add what the message itself contains and no prefix did."""
    text = parsed.text
    found: dict[str, str | float | int | None] = {}
    if parsed.time is None and (stamp := _C10.match(text)):
        month, day, clock = stamp.groups()
        found["time"] = _time_without_year(int(month), int(day), clock, reference)
        found["text"] = _C10_ERROR.sub("", text)
    if parsed.time is None and text.startswith("{") and (stamp := _JSON_TIME.match(text)):
        found["time"] = _parse_time(stamp[1])
    if parsed.node is None and parsed.host is None:
        node = _NCCL.match(text) or _NODE_IN_TEXT.search(text)
        if node:
            name = node[1] or node[2]
            found["node" if _ALGO.fullmatch(name) else "host"] = name
    if parsed.rank is None and "ank" in text and (rank := _RANK.search(text)):
        found["rank"] = int(next(group for group in rank.groups() if group))
    if parsed.task is None and (task := _TASK_IN_TEXT.match(text)):
        found["task"] = int(task[1])
    if parsed.local_rank is None and (local := _LOCAL_RANK.search(text)):
        found["local_rank"] = int(next(group for group in local.groups() if group))
    return replace(parsed, **found) if found else parsed  # type: ignore[arg-type]


def _without_learned(line: LogLine, match: re.Match[str]) -> LogLine:
    """Remove a learned prefix, which may name the rank and the machine."""
    prefix = match[0]
    rank = _RANK_IN_PREFIX.search(prefix)
    host = _HOST_IN_PREFIX.search(prefix)
    return replace(
        line,
        text=line.text[match.end() :],
        rank=int(rank[1]) if rank else line.rank,
        host=host[1] if host and line.host is None else line.host,
        label=_LEVEL.sub("", _CHANGES.sub("", prefix)),
    )


def _strip_prefixes(line: LogLine, reference: float) -> LogLine:
    """Remove known prefixes until none matches; the first time and the last node and rank count."""
    text, time = line.text, line.time
    found: dict[str, str] = {}
    stripped = True
    while stripped:
        stripped = False
        for pattern in _candidates(text[:1]):
            match = pattern.match(text)
            if match is None:
                continue
            stripped = True
            text = text[match.end() :]
            groups = {name: value for name, value in match.groupdict().items() if value}
            if time is None:
                time = _time_in(groups, reference)
            found |= groups
    if text == line.text:
        return line
    return LogLine(
        text,
        time,
        found.get("node") or line.node,
        int(found["rank"]) if "rank" in found else line.rank,
        found.get("host") or line.host,
        int(found["local_rank"]) if "local_rank" in found else line.local_rank,
        int(found["task"]) if "task" in found else line.task,
        found.get("label") or line.label,
    )


def _candidates(first: str) -> tuple[re.Pattern[str], ...]:
    """Return the prefixes that may start with the character ``first``."""
    if first.isdigit():
        return _AFTER_DIGIT
    if first.isalpha():
        return _AFTER_LETTER
    if first == "[":
        return _AFTER_BRACKET
    if first == "(":
        return _AFTER_PARENTHESIS
    if first == "{":
        return _AFTER_BRACE
    if first == "│":
        return _AFTER_BOX
    return _AFTER_SPACE if first in (" ", "\t", "|") else ()


def _time_in(groups: dict[str, str], reference: float) -> float | None:
    """Return the time of a prefix, None if it has none or an invalid one."""
    if "time" in groups:
        return _parse_time(groups["time"])
    if "syslog" in groups:
        return _parse_syslog_time(groups["syslog"], reference)
    if "ctime" in groups:
        return _parse_ctime(groups["ctime"])
    return None


def _parse_time(stamp: str) -> float | None:
    """Parse a time as :data:`_TIME` matches it; return None if it is not a valid date."""
    try:
        time = datetime.fromisoformat(stamp.replace("/", "-").replace("_", " ").replace(",", "."))
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _parse_ctime(stamp: str) -> float | None:
    try:
        return datetime.strptime(stamp, "%b %d %H:%M:%S %Y").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _parse_syslog_time(stamp: str, reference: float) -> float | None:
    try:
        # 2000 is a leap year, so that February 29 can be parsed.
        time = datetime.strptime(f"2000 {stamp}", "%Y %b %d %H:%M:%S")
    except ValueError:
        return None
    return _time_without_year(time.month, time.day, f"{time:%H:%M:%S}", reference)


def _time_without_year(month: int, day: int, clock: str, reference: float) -> float | None:
    year = datetime.fromtimestamp(reference, UTC).year
    for candidate in (year, year - 1):
        time = _parse_time(f"{candidate}-{month:02}-{day:02} {clock}")
        # Allow one day: the reference may come from a clock that is behind.
        if time is not None and time <= reference + 86400:
            return time
    return None

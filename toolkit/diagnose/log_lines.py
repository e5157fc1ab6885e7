"""Parses one line of a job's log: its time, node, rank and message."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime

# "\x1b[34m", "\x1b[0m": colors
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# " 50%|x | 5/10\r100%|x | 10/10": a terminal shows only the text after the last carriage return,
# which CloudWatch writes as "#015".
_LAST_RETURN = re.compile(r"^.*(?:\r|#015)(?=.)")
# "  5%|▌    | 72/1398 [1:12:34<24:31:08, 66.57s/it]RuntimeError: …": a message after a tqdm bar
_PROGRESS_BAR = re.compile(r"^.*?\d+%\|[^|]*\| [^\]]*\](?=\S)")

# 2026-11-21T10:00:00.250Z, 2026-11-21 10:00:00,250, 2026/11/21 10:00:00, 2026-11-22_08:01:41
_TIME = r"\d{4}[-/]\d\d[-/]\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
# Prefixes that launchers, runtimes and log viewers put before a message, in any order and number.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # "2026-11-21 10:00:00,250 - …", "[2026-11-21 10:00:00] …", "  | 2026-11-21T10:00:00Z | …"
        rf"(?:\s*\|\s*(?=\d))?\[?(?P<time>{_TIME})\]?(?:,? -)?(?:\s*\|)?\s?",
        # `aws logs tail`: "my-job/algo-2-1700000000 …"; docker compose: "algo-2-abc12  | …"
        r"(?:[\w.-]+/)?(?P<node>algo-\d+)(?:-\w+)?(?:\s*\|\s?| |: )",
        # mpirun on SageMaker: "[1,mpirank:3,algo-2]<stderr>:…"
        r"\[1,mpirank:(?P<rank>\d+),(?P<node>algo-\d+)\]<std(?:err|out)>:",
        # mpirun --tag-output: "[1,15]<stdout>:…"
        r"\[(?:1,)?(?P<rank>\d+)\]<std(?:err|out)>:",
        # PyTorch: "[rank3]: Traceback …", "[rank3]:[E321 02:07:08 …"
        r"\[rank(?P<rank>\d+)\]:(?: |(?=\[))",
        # torchrun --tee: "[default3]:…"
        r"\[default\d+\]:",
        # "10.0.1.5: …": pdsh and DeepSpeed
        r"\d+\.\d+\.\d+\.\d+: ",
        # Ray: "(train_func pid=1203, ip=10.0.1.5) …"
        r"\(\w+ pid=\d+(?:, ip=[\d.]+)?\) ",
        # syslog: "Nov 21 10:00:00 ip-10-0-1-5 kernel: …"
        r"(?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \S+ ",
        # dmesg: "[18026.221140] NVRM: …", "[ 130.456250] [ T1946] NVRM: …"
        r"\[ *\d+\.\d+\] (?:\[ *T\d+\] )?",
    )
)
# PyTorch: "[E321 02:07:08.408271257 File.cpp:607]" in C++, "E0321 02:07:08.408000 …" in Python
_C10 = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d(?:\.\d{1,6})?)")
# NCCL: "algo-3:40:90 [2] NCCL INFO …", with the host name, process, thread and local GPU
_NCCL = re.compile(r"(algo-\d+):\d+:\d+ \[\d+\] ")
# "[rank 5]", "[PG ID 0 PG GUID 0 Rank 5]", "rank 5 failed: ", "process rank 5 ", "Rank 6: ",
# '{…"rank": 3}'
_RANK = re.compile(
    r"\[[Rr]ank[ :=]?(\d+)\]|\bPG [^\]]*Rank (\d+)\]|\brank (\d+) failed: |process rank (\d+) "
    r"|^\W{0,3}[Rr]ank[ :=]{1,2}(\d+)\b|^\{.*\"rank\": ?(\d+)"
)
# '{"ts": "2026-11-21T10:00:00Z", …}': structured logs
_JSON_TIME = re.compile(rf'^\{{.*"(?:ts|time|@?timestamp)": ?"({_TIME})"')
# mpirun: "mpirun noticed that process rank 3 with PID 120 on node algo-2 exited on signal 9"
_MPI_NODE = re.compile(r"on node (algo-\d+) exited")


@dataclass(frozen=True)
class LogLine:
    """A parsed line; ``time`` is in Unix seconds, and fields the line does not contain are None.

    ``text`` is the message without prefixes and terminal codes; its indentation is kept.
    """

    text: str
    time: float | None = None
    node: str | None = None
    rank: int | None = None

    @property
    def source(self) -> tuple[str | None, int | None]:
        """The node and rank: lines of one source belong together even if others are between."""
        return self.node, self.rank


def parse_line(line: str, reference: float) -> LogLine:
    """Parse ``line``.

    Times without a zone are UTC, as in AWS's containers. Times without a year belong to the latest
    year in which they are not after ``reference`` (Unix seconds).
    """
    text = _TERMINAL_CODES.sub("", line.rstrip("\r\n"))
    if "\r" in text or "#015" in text:
        text = _LAST_RETURN.sub("", text)
    if "%|" in text:
        text = _PROGRESS_BAR.sub("", text)
    parsed = _strip_prefixes(text, reference)
    # The message itself may contain what no prefix did.
    if parsed.time is None and (stamp := _C10.match(parsed.text)):
        month, day, clock = stamp.groups()
        parsed = replace(parsed, time=_time_without_year(int(month), int(day), clock, reference))
    if parsed.time is None and (stamp := _JSON_TIME.match(parsed.text)):
        parsed = replace(parsed, time=_parse_time(stamp[1]))
    if parsed.node is None and (node := _NCCL.match(parsed.text) or _MPI_NODE.search(parsed.text)):
        parsed = replace(parsed, node=node[1])
    if parsed.rank is None and (rank := _RANK.search(parsed.text)):
        parsed = replace(parsed, rank=int(next(group for group in rank.groups() if group)))
    return parsed


def _strip_prefixes(text: str, reference: float) -> LogLine:
    """Remove known prefixes until none matches; the first time and the last node and rank count."""
    parsed = LogLine(text)
    stripped = True
    while stripped:
        stripped = False
        for pattern in _PREFIXES:
            match = pattern.match(parsed.text)
            if match is None:
                continue
            stripped = True
            groups = match.groupdict()
            time = parsed.time
            if groups.get("time"):
                time = _parse_time(groups["time"])
            elif groups.get("syslog"):
                time = _parse_syslog_time(groups["syslog"], reference)
            parsed = LogLine(
                parsed.text[match.end() :],
                time if parsed.time is None else parsed.time,
                groups.get("node") or parsed.node,
                int(groups["rank"]) if groups.get("rank") else parsed.rank,
            )
    return parsed


def _parse_time(stamp: str) -> float | None:
    """Parse a time as :data:`_TIME` matches it; return None if it is not a valid date."""
    try:
        time = datetime.fromisoformat(stamp.replace("/", "-").replace("_", " ").replace(",", "."))
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


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

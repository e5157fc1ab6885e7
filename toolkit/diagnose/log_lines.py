"""One line of a job's log: when, on which node and by which rank it was said, and what."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LAST_RETURN = re.compile(r"^.*(?:\r|#015)(?=.)")
"""CloudWatch shows a carriage return as ``#015``; only what comes after the last one is seen."""
_PROGRESS_BAR = re.compile(r"^.*?\d+%\|[^|]*\| [^\]]*\](?=\S)")
"""A bar that an error message was written behind."""

_TIME = r"\d{4}[-/]\d\d[-/]\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?:\s*\|\s*(?=\d))?\[?(?P<time>{_TIME})\]?(?:,? -)?(?:\s*\|)?\s?",
        # `aws logs tail` names the stream, docker compose the container.
        r"(?:[\w.-]+/)?(?P<node>algo-\d+)(?:-\w+)?(?:\s*\|\s?| |: )",
        r"\[1,mpirank:(?P<rank>\d+),(?P<node>algo-\d+)\]<std(?:err|out)>:",
        r"\[(?:1,)?(?P<rank>\d+)\]<std(?:err|out)>:",
        r"\[rank(?P<rank>\d+)\]:(?: |(?=\[))",
        r"\[default\d+\]:",
        r"\d+\.\d+\.\d+\.\d+: ",
        r"\(\w+ pid=\d+(?:, ip=[\d.]+)?\) ",
        r"(?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \S+ ",
        r"\[ *\d+\.\d+\] (?:\[ *T\d+\] )?",
    )
)
_C10 = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d(?:\.\d{1,6})?)")
"""PyTorch's own: ``[E321 02:07:08.408271257 File.cpp:607]`` and, from Python, ``E0321 …``."""
_NCCL = re.compile(r"(algo-\d+):\d+:\d+ \[\d+\] ")
_RANK = re.compile(
    r"\[[Rr]ank[ :=]?(\d+)\]|\bPG [^\]]*Rank (\d+)\]|\brank (\d+) failed: |process rank (\d+) "
    r"|^\W{0,3}[Rr]ank[ :=]{1,2}(\d+)\b|^\{.*\"rank\": ?(\d+)"
)
_JSON_TIME = re.compile(rf'^\{{.*"(?:ts|time|@?timestamp)": ?"({_TIME})"')
_MPI_NODE = re.compile(r"on node (algo-\d+) exited")


@dataclass(frozen=True)
class LogLine:
    """A line taken apart; ``time`` is in Unix seconds, and whatever it does not say is None.

    ``text`` is the message without prefixes and terminal codes, its indentation kept.
    """

    text: str
    time: float | None = None
    node: str | None = None
    rank: int | None = None

    @property
    def speaker(self) -> tuple[str | None, int | None]:
        """Lines of one speaker belong together, though others' stand between them."""
        return self.node, self.rank


def parse_line(line: str, reference: float) -> LogLine:
    """Take ``line`` apart.

    Times without a zone are UTC, as in AWS's containers; those without a year are of the last
    year in which they are not after ``reference`` (Unix seconds).
    """
    text = _TERMINAL_CODES.sub("", line.rstrip("\r\n"))
    if "\r" in text or "#015" in text:
        text = _LAST_RETURN.sub("", text)
    if "%|" in text:
        text = _PROGRESS_BAR.sub("", text)
    found = _take_prefixes(text, reference)
    if found.time is None and (stamp := _C10.match(found.text)):
        month, day, clock = stamp.groups()
        found = replace(found, time=_without_year(int(month), int(day), clock, reference))
    if found.time is None and (said := _JSON_TIME.match(found.text)):
        found = replace(found, time=_with_year(said[1]))
    if found.node is None and (host := _NCCL.match(found.text) or _MPI_NODE.search(found.text)):
        found = replace(found, node=host[1])
    if found.rank is None and (rank := _RANK.search(found.text)):
        found = replace(found, rank=int(next(group for group in rank.groups() if group)))
    return found


def _take_prefixes(text: str, reference: float) -> LogLine:
    found = LogLine(text)
    taken = True
    while taken:
        taken = False
        for pattern in _PREFIXES:
            match = pattern.match(found.text)
            if match is None:
                continue
            taken = True
            said = match.groupdict()
            time = found.time
            if said.get("time"):
                time = _with_year(said["time"])
            elif said.get("syslog"):
                time = _syslog(said["syslog"], reference)
            found = LogLine(
                found.text[match.end() :],
                time if found.time is None else found.time,
                said.get("node") or found.node,
                int(said["rank"]) if said.get("rank") else found.rank,
            )
    return found


def _with_year(stamp: str) -> float | None:
    try:
        found = datetime.fromisoformat(stamp.replace("/", "-").replace("_", " ").replace(",", "."))
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _syslog(stamp: str, reference: float) -> float | None:
    try:
        found = datetime.strptime(f"2000 {stamp}", "%Y %b %d %H:%M:%S")
    except ValueError:
        return None
    return _without_year(found.month, found.day, f"{found:%H:%M:%S}", reference)


def _without_year(month: int, day: int, clock: str, reference: float) -> float | None:
    year = datetime.fromtimestamp(reference, UTC).year
    for candidate in (year, year - 1):
        found = _with_year(f"{candidate}-{month:02}-{day:02} {clock}")
        # A day's grace: the reference may be of a clock that is behind.
        if found is not None and found <= reference + 86400:
            return found
    return None

"""Helpers of the tests of corpus, which other tests use as well."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

from tests.toolkit.analysis.diagnose.log_corpus import (
    KnownLog,
)


def prefixed(prefix: str) -> Callable[[list[str]], str]:
    """Return a function that puts a prefix before every line; ``{}`` is the line's number."""
    return lambda lines: "".join(
        f"{prefix.format(f'{number % 1000:03}')}{line}\n" for number, line in enumerate(lines)
    )


def line_prefix(prefix: Callable[[int], str]) -> Callable[[list[str]], str]:
    """Return a function that puts ``prefix`` of the second of a line before it."""
    return lambda lines: "".join(
        f"{prefix(number % 60)}{line}\n" for number, line in enumerate(lines)
    )


def csv_export(lines: list[str]) -> str:
    text = io.StringIO()
    rows = [[1795255200000 + 10 * number, line] for number, line in enumerate(lines)]
    csv.writer(text).writerows([["timestamp", "message"], *rows])
    return text.getvalue()


def json_rows(lines: list[str], time: str, message: str) -> list[dict[str, object]]:
    return [
        {time: f"2026-11-21T10:00:00.{number % 1000:03}Z", message: line}
        for number, line in enumerate(lines)
    ]


def lines_of(log: KnownLog) -> list[str]:
    """Return the lines of a log, [] of an export in JSON and of a folder with a log per node."""
    text = log.path.read_text() if log.path.is_file() else "["
    return (
        [] if text.startswith(("[\n", "{", "[{")) or text == "[" else text.rstrip("\n").split("\n")
    )


FORMS: dict[str, Callable[[list[str]], str]] = {
    "console CSV": csv_export,
    "Insights JSON": lambda lines: json.dumps(json_rows(lines, "@timestamp", "@message"), indent=1),
    "get-log-events": lambda lines: json.dumps(
        {"events": json_rows(lines, "timestamp", "message"), "nextForwardToken": "f/1"}, indent=4
    ),
    "docker": lambda lines: "".join(
        f"{json.dumps(row)}\n" for row in json_rows(lines, "time", "log")
    ),
    "logs tail": prefixed("2026-11-21T10:00:00.{}+00:00 my-job/algo-1-1700000000 "),
    "CRI": prefixed("2026-11-21T10:00:00.{}Z stderr F "),
    "kubectl": prefixed("[pod/train-worker-1/pytorch] "),
    "stern": prefixed("train-worker-1 pytorch "),
    "journald": prefixed("Nov 21 10:00:00 ip-10-0-1-5 python[120]: "),
    "srun": prefixed("0: "),
    "pdsh": prefixed("10.0.1.5: "),
    "torchrun": prefixed("[default0]:"),
    "ray": prefixed("(train_func pid=1203, ip=10.0.1.5) "),
    "loguru": prefixed("2026-11-21 10:00:00.{} | ERROR    | __main__:main:88 - "),
    "logging": prefixed("2026-11-21 10:00:00,{} - root - ERROR - "),
    "colors": prefixed("\x1b[34m"),
    "progress bar": prefixed("  3%|▎         | 30/1000 [00:30<16:10,  1.00s/it]\r"),
    "Windows": lambda lines: "\r\n".join([*lines, ""]),
}

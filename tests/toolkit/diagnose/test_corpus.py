"""Tests of the accuracy of `diagnose` on real logs; `benchmarks/diagnose_accuracy.py` prints it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sm_train.toolkit.diagnose.diagnosis import NO_FAILURE, UNKNOWN, diagnose
from sm_train.toolkit.diagnose.log_files import log_files
from sm_train.toolkit.diagnose.matches import LogStream

from tests.toolkit.diagnose.log_corpus import CORPUS, KnownLog, corpus, is_confident, parts, score
from tests.toolkit.diagnose.test_log_exports import PREFIXES

PARTS = parts(corpus())


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
    path = CORPUS / f"{log.name}.log"
    text = path.read_text() if path.exists() else "["
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


LEARNED = {
    *("stern", "stern with time", "docker compose", "syslog", "pdsh", "mpirun --timestamp-output"),
    *("loguru info", "logging info", "logging clock", "SkyPilot", "HyperPod", "worker"),
    *("determined", "databricks", "tab", "milabench"),
}
"""Prefixes that only a traceback or the other lines of a log reveal."""
KNOWN_FORMS = {
    name: form
    for name, form in (
        FORMS | {name: line_prefix(prefix) for name, prefix in PREFIXES.items()}
    ).items()
    if name not in LEARNED
}


def test_corpus_is_large_and_has_a_source_for_every_log() -> None:
    logs = corpus()
    assert len(logs) >= 120
    assert {log.name for log in logs} == {
        path.stem for path in CORPUS.iterdir() if path.suffix in (".log", "")
    }
    assert all(log.source.startswith("https://") for log in logs)
    assert len(PARTS["held out"]) >= len(logs) * 0.3
    assert sum(not log.nameable for log in logs) >= 15


@pytest.mark.parametrize("part", PARTS)
def test_answers_are_precise_and_complete(part: str) -> None:
    result = score(PARTS[part])
    # The failures of the held-out part are counted, not shown: they are not for tuning.
    shown = (*result.wrong, *result.missed) if part == "tuned" else ()
    assert result.precision >= 0.98, shown
    assert result.precision_with_guesses >= 0.96
    assert result.recall >= 0.93, shown


def test_ranks_and_nodes_of_tuned_logs_are_right() -> None:
    assert score(PARTS["tuned"]).wrong_origin == ()


TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 88, in <module>']


@pytest.mark.parametrize(
    ("log", "form"),
    [
        (log, list(KNOWN_FORMS)[number % len(KNOWN_FORMS)])
        for number, log in enumerate(one for one in corpus() if lines_of(one) not in ([], [""]))
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_answer_is_the_same_in_every_form_of_a_log(
    log: KnownLog, form: str, tmp_path: Path
) -> None:
    path = tmp_path / "export.log"
    path.write_text(KNOWN_FORMS[form](lines_of(log)))
    found, plain = diagnose(log_files([path])), log.diagnose()
    assert found.cause in (*log.causes, plain.cause)
    # A form that names a rank itself gives it to every line.
    path.write_text(KNOWN_FORMS[form]([*TRACEBACK, "RuntimeError: CUDA error: misaligned address"]))
    of_form = diagnose(log_files([path])).first
    own_rank = of_form.rank if of_form else None
    if own_rank is None and plain.first and plain.first.rank == log.rank is not None:
        assert found.first is not None
        # On the second node, the local rank of a log without nodes does not tell the rank.
        is_unknown = found.first.rank is None and found.first.node == "algo-2"
        assert is_unknown or found.first.rank == log.rank


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS | PREFIXES)
def test_answers_in_every_form_are_as_right_as_those_of_the_plain_logs(
    form: str, tmp_path: Path
) -> None:
    path = tmp_path / "export.log"
    written = FORMS.get(form) or line_prefix(PREFIXES[form])
    # A prefix of every line can be learned only from several lines.
    shortest = 3 if form in LEARNED else 1
    logs = [log for log in corpus() if log.nameable and len(lines_of(log)) >= shortest]
    wrong, missed = [], []
    for log in logs:
        path.write_text(written(lines_of(log)))
        found = diagnose(log_files([path]))
        assert found.cause != NO_FAILURE
        if is_confident(found) and not log.accepts(found):
            wrong.append(f"{log.name}: {found.cause}")
        elif found.cause == UNKNOWN:
            missed.append(log.name)
    assert len(wrong) <= 0.02 * len(logs), wrong
    assert len(missed) <= (0.04 if form in LEARNED else 0.03) * len(logs), missed


@pytest.mark.parametrize("log", [log for log in corpus() if log.nameable], ids=lambda log: log.name)
def test_failed_log_is_never_without_a_failure(log: KnownLog) -> None:
    """Also if only its second half is there."""
    assert log.diagnose().cause != NO_FAILURE
    path = CORPUS / f"{log.name}.log"
    if path.exists():
        [stream] = log_files([path])
        content = b"".join(stream.blocks())
        half = LogStream(stream.name, lambda: [content[len(content) // 2 :]])
        assert diagnose([half]).cause != NO_FAILURE

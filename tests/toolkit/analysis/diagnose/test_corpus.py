"""Tests of the accuracy of `diagnose` on real logs; `benchmarks/diagnose_accuracy.py` prints it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from sm_train.toolkit.analysis.diagnose.diagnosis import NO_FAILURE, UNKNOWN, diagnose
from sm_train.toolkit.analysis.diagnose.log_files import log_files
from sm_train.toolkit.records.job_logs import LogStream

from tests.toolkit.analysis.diagnose.corpus_support import FORMS, line_prefix, lines_of
from tests.toolkit.analysis.diagnose.log_corpus import (
    KnownLog,
    corpus,
    is_confident,
    log_texts,
    parts,
    score,
)
from tests.toolkit.analysis.diagnose.log_exports_support import PREFIXES

PARTS = parts(corpus())


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
    names = [name for name, _ in log_texts()]
    assert len(names) == len(set(names))
    assert {log.name for log in logs} == {
        name.partition("/")[0].removesuffix(".log") for name in names
    }
    assert all(log.source.startswith("https://") for log in logs)
    assert len(PARTS["held out"]) >= len(logs) * 0.3
    assert sum(not log.nameable for log in logs) >= 15


def test_logs_are_restored_byte_for_byte() -> None:
    """Also the carriage returns of progress bars, which editors and Git may replace."""
    logs = dict(log_texts())
    assert all(content.endswith(b"\n") or not content for content in logs.values())
    digest = hashlib.sha256()
    with_returns = sorted(name for name in logs if b"\r" in logs[name])
    for name in with_returns[:10]:
        digest.update(logs[name])
    assert (
        digest.hexdigest() == "af6a00950c81e202056ce43f44a217d1844d6055bde21c1d41069b949d1300fc"
    ), with_returns


@pytest.mark.integration
@pytest.mark.parametrize("part", PARTS)
def test_answers_are_precise_and_complete(part: str) -> None:
    result = score(PARTS[part])
    # The failures of the held-out part are counted, not shown: they are not for tuning.
    shown = (*result.wrong, *result.missed) if part == "tuned" else ()
    assert result.precision >= 0.98, shown
    assert result.precision_of_all >= 0.96
    assert result.recall >= 0.93, shown


@pytest.mark.integration
def test_ranks_and_nodes_of_tuned_logs_are_right() -> None:
    assert score(PARTS["tuned"]).wrong_origin == ()


TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 88, in <module>']


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_answer_is_the_same_in_every_form_of_a_log(part: str, tmp_path: Path) -> None:
    """Every log in one form, the forms in turn."""
    logs = [log for log in corpus() if lines_of(log) not in ([], [""])]
    forms = list(KNOWN_FORMS)
    mismatches = [
        f"{log.name} as {form}: {problem}"
        for number, log in enumerate(logs)
        if log in PARTS[part]
        for form in [forms[number % len(forms)]]
        for problem in differences(log, form, tmp_path / "export.log")
    ]
    assert not mismatches, "\n".join(mismatches)


def differences(log: KnownLog, form: str, path: Path) -> Iterator[str]:
    """Yield what `diagnose` finds with confidence in a form of a log, but not in the plain log."""
    path.write_text(KNOWN_FORMS[form](lines_of(log)))
    found, plain = diagnose(log_files([path])), log.diagnose()
    if is_confident(found) and found.cause not in (*log.causes, plain.cause):
        yield f"{found.cause}, expected {plain.cause}"
    if log.rank is None or not plain.first or plain.first.rank != log.rank:
        return
    if rank_of_form(form, path) is None:
        first = found.first
        # On the second node, the local rank of a log without nodes does not tell the rank.
        is_unknown = first is not None and first.rank is None and first.node == "algo-2"
        if not is_unknown and (first is None or first.rank != log.rank):
            yield f"rank {first.rank if first else None}, expected {log.rank}"


def rank_of_form(form: str, path: Path) -> int | None:
    """Return the rank that a form gives to every line."""
    path.write_text(KNOWN_FORMS[form]([*TRACEBACK, "RuntimeError: CUDA error: misaligned address"]))
    first = diagnose(log_files([path])).first
    return first.rank if first else None


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
    assert len(missed) <= (0.08 if form in LEARNED else 0.03) * len(logs), missed


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_failed_log_is_never_without_a_failure(part: str) -> None:
    """Also if only its second half is there."""
    mismatches = []
    for log in PARTS[part]:
        if not log.nameable:
            continue
        if log.diagnose().cause == NO_FAILURE:
            mismatches.append(log.name)
        if log.path.is_file():
            [stream] = log_files([log.path])
            content = b"".join(stream.blocks())
            end = [content[len(content) // 2 :]]
            if diagnose([LogStream(stream.name, lambda end=end: end)]).cause == NO_FAILURE:
                mismatches.append(f"{log.name}, second half")
    assert not mismatches, "\n".join(mismatches)

"""Tests of the accuracy of `diagnose` on real logs; `benchmarks/diagnose_accuracy.py` prints it."""

from __future__ import annotations

import pytest
from sm_train.toolkit.diagnose.diagnosis import NO_FAILURE, diagnose
from sm_train.toolkit.diagnose.log_files import log_files
from sm_train.toolkit.diagnose.matches import LogStream

from tests.toolkit.diagnose.log_corpus import CORPUS, KnownLog, corpus, parts, score

PARTS = parts(corpus())


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
    assert result.recall >= 0.93, shown


def test_ranks_and_nodes_of_tuned_logs_are_right() -> None:
    assert score(PARTS["tuned"]).wrong_origin == ()


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

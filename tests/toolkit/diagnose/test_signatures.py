"""Tests of every signature on its examples, and on lines that must not match."""

from __future__ import annotations

import re

import pytest
from sm_train.toolkit.diagnose.diagnosis import UNKNOWN
from sm_train.toolkit.diagnose.log_scanner import searched_literals
from sm_train.toolkit.diagnose.signatures import Signature, matching_exception, signatures

from tests.support.log_lines import DONE, HEALTHY, WRITTEN, diagnosed, haystack, is_left_alone, step

BEGIN = "Traceback (most recent call last):"
FRAME = '  File "/opt/ml/code/train.py", line 88, in main'
EXAMPLES = [(one.code, line) for one in signatures().values() for line in one.examples]
LINES = [
    pytest.param(code, line, id=f"{code}-{number}") for number, (code, line) in enumerate(EXAMPLES)
]


def failed(line: str, prefix: str = "") -> list[str]:
    """Return a log that ends with ``line``, the last one of a traceback if it is an exception."""
    lines = haystack(line)
    if any(one.role == "exception" for one in matching_exception(line)):
        lines[-1:] = [prefix + BEGIN, prefix + FRAME]
        return [*lines, prefix + line]
    return [*lines[:-1], prefix + line]


@pytest.mark.parametrize(("code", "line"), LINES)
def test_example_at_the_end_of_a_healthy_log_is_diagnosed(code: str, line: str) -> None:
    found = diagnosed(failed(line))
    if signatures()[code].role == "echo":
        assert found.cause == UNKNOWN
        assert found.first is None
        assert found.confidence is None
    elif signatures()[code].role == "warning":
        assert is_left_alone(found)
        assert any(signatures()[code].title in detail for detail in found.details)
    else:
        assert (found.cause, found.confidence) == (code, signatures()[code].confidence)
        assert found.evidence[0].order == len(failed(line))


@pytest.mark.parametrize(("code", "line"), LINES)
def test_example_with_prefixes_is_diagnosed_alike(code: str, line: str) -> None:
    if line.startswith("[rank"):
        line = line.split(":", 1)[1].lstrip()
    for prefix in (
        "2026-11-21T10:00:00.123456+00:00 my-job/algo-2-1700000000 ",
        "[1,mpirank:11,algo-2]<stderr>:",
        "\x1b[34m[rank11]: ",
    ):
        if signatures()[code].role in ("cause", "symptom", "exception"):
            found = diagnosed(failed(line, prefix))
            assert found.cause == code
            assert found.first is not None


@pytest.mark.parametrize(("code", "line"), LINES)
def test_example_followed_by_steps_is_no_failure(code: str, line: str) -> None:
    further_steps = [step(number, WRITTEN + number) for number in range(50, 60)]
    assert is_left_alone(diagnosed([*failed(line), *further_steps]))
    assert diagnosed([*failed(line), *further_steps, DONE]).cause == "no-failure"


@pytest.mark.parametrize("line", HEALTHY)
def test_healthy_line_is_no_failure(line: str) -> None:
    assert is_left_alone(diagnosed([line]))
    assert diagnosed([line, DONE]).cause == "no-failure"


@pytest.mark.parametrize("one", signatures().values(), ids=lambda one: one.code)
def test_no_signature_advises_to_delete_anything(one: Signature) -> None:
    assert not re.search(r"\b(?:[Dd]elete|[Rr]emove|rm|[Ee]rase|[Tt]ake .* away)\b", one.action)


def test_explains_has_no_cycles() -> None:
    explains = {code: one.explains for code, one in signatures().items()}
    for code in explains:
        reached: set[str] = set()
        pending = set(explains[code])
        while pending:
            reached |= pending
            pending = {far for near in pending for far in explains[near]} - reached
        assert code not in reached


def test_event_of_a_step_holds_no_searched_literal() -> None:
    """Such a literal would have every one of them parsed."""
    line = step(120, WRITTEN)
    assert [text for text in searched_literals() if text in line] == []


def test_signatures_are_numerous_and_complete() -> None:
    table = signatures()
    assert sum(one.role in ("cause", "symptom") for one in table.values()) >= 40
    for one in table.values():
        assert one.examples
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one.code)
        assert one.explains <= table.keys()
        assert one.source.startswith(("https://", "this project"))
        assert one.action.endswith((".", ")"))
        # Lines without a literal are skipped, so every example must contain one.
        if one.exception is None:
            assert all(any(text in line for text in one.literals) for line in one.examples)
        assert min(map(len, one.literals), default=4) >= 4

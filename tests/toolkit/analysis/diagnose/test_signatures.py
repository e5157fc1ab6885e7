"""Tests of every signature on its examples, and on lines that must not match."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.toolkit.analysis.diagnose.diagnosis import UNKNOWN, Diagnosis
from sm_train.toolkit.analysis.diagnose.line_patterns import searched_pattern
from sm_train.toolkit.analysis.diagnose.signatures import Signature, matching_exception, signatures

from tests.support.log_lines import DONE, HEALTHY, WRITTEN, diagnosed, haystack, is_left_alone, step

BEGIN = "Traceback (most recent call last):"
FRAME = '  File "/opt/ml/code/train.py", line 88, in main'
EXAMPLES = [
    (signature.code, line) for signature in signatures().values() for line in signature.examples
]


def failed(line: str, prefix: str = "") -> list[str]:
    """Return a log that ends with ``line``, the last one of a traceback if it is an exception."""
    lines = haystack(line)
    if any(match.role == "exception" for match in matching_exception(line)):
        lines[-1:] = [prefix + BEGIN, prefix + FRAME]
        return [*lines, prefix + line]
    return [*lines[:-1], prefix + line]


@pytest.mark.integration
def test_example_at_the_end_of_a_healthy_log_is_diagnosed() -> None:
    mismatches = [
        f"{code}: {line}: {found.cause} ({found.confidence}), {found.details}"
        for code, line in EXAMPLES
        for found in [diagnosed(failed(line))]
        if not is_as_the_role_demands(signatures()[code], found, len(failed(line)))
    ]
    assert not mismatches, "\n".join(mismatches)


def is_as_the_role_demands(signature: Signature, found: Diagnosis, last: int) -> bool:
    """Return whether the answer to an example in line ``last`` is that of the signature's role."""
    if signature.role == "echo":
        return (found.cause, found.first, found.confidence) == (UNKNOWN, None, None)
    if signature.role == "warning":
        return is_left_alone(found) and any(signature.title in text for text in found.details)
    return (found.cause, found.confidence) == (signature.code, signature.confidence) and (
        found.evidence[0].order == last
    )


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    "prefix",
    [
        "2026-11-21T10:00:00.123456+00:00 my-job/algo-2-1700000000 ",
        "[1,mpirank:11,algo-2]<stderr>:",
        "\x1b[34m[rank11]: ",
    ],
)
def test_example_with_a_prefix_is_diagnosed_alike(prefix: str) -> None:
    mismatches = []
    for code, line in EXAMPLES:
        if signatures()[code].role not in ("cause", "symptom", "exception"):
            continue
        text = line.split(":", 1)[1].lstrip() if line.startswith("[rank") else line
        found = diagnosed(failed(text, prefix))
        if found.cause != code or found.first is None:
            mismatches.append(f"{code}: {text}: {found.cause}, {found.first}")
    assert not mismatches, "\n".join(mismatches)


@pytest.mark.integration
def test_example_followed_by_steps_is_no_failure() -> None:
    further_steps = [step(number, WRITTEN + number) for number in range(12, 22)]
    mismatches = []
    for code, line in EXAMPLES:
        lines = [*failed(line), *further_steps]
        if not is_left_alone(diagnosed(lines)):
            mismatches.append(f"{code}: {line}")
        if (found := diagnosed([*lines, DONE])).cause != "no-failure":
            mismatches.append(f"{code}: {line}, then the end of the run: {found.cause}")
    assert not mismatches, "\n".join(mismatches)


def test_healthy_line_is_no_failure() -> None:
    accused = [line for line in HEALTHY if not is_left_alone(diagnosed([line]))]
    failed_runs = [line for line in HEALTHY if diagnosed([line, DONE]).cause != "no-failure"]
    assert (accused, failed_runs) == ([], [])


def test_no_signature_advises_to_delete_anything() -> None:
    advice = re.compile(r"\b(?:[Dd]elete|[Rr]emove|rm|[Ee]rase|[Tt]ake .* away)\b")
    assert [code for code, found in signatures().items() if advice.search(found.action)] == []


def test_explains_has_no_cycles() -> None:
    explains = {code: signature.explains for code, signature in signatures().items()}
    for code in explains:
        reached: set[str] = set()
        pending = set(explains[code])
        while pending:
            reached |= pending
            pending = {far for near in pending for far in explains[near]} - reached
        assert code not in reached


def test_event_of_a_step_is_not_parsed() -> None:
    assert searched_pattern().search(step(120, WRITTEN).encode()) is None


def test_signatures_are_numerous_and_complete() -> None:
    table = signatures()
    assert sum(signature.role in ("cause", "symptom") for signature in table.values()) >= 40
    for signature in table.values():
        assert signature.examples
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", signature.code)
        assert signature.explains <= table.keys()
        assert signature.source.startswith(("https://", "this project"))
        assert signature.action.endswith((".", ")"))


def test_every_pattern_requires_a_string() -> None:
    """A pattern without one would have every line of a log parsed."""
    assert searched_pattern().search(b"") is None
    assert searched_pattern().search(b"0 a.b: c=1 [d]") is None


@pytest.mark.parametrize("code", [code for code, entry in signatures().items() if entry.regex])
@settings(max_examples=15)
@given(st.data())
def test_line_that_a_signature_matches_is_parsed(code: str, data: st.DataObject) -> None:
    """The pattern of all signatures is RE2's and looser than each of them: it misses no match."""
    signature = signatures()[code]
    assert signature.regex is not None
    # RE2 does not count a vertical tab as white space.
    characters = st.characters(max_codepoint=127, exclude_characters="\v")
    pattern = re.compile(signature.regex.pattern, re.ASCII)
    text = data.draw(st.from_regex(pattern, alphabet=characters))
    assert searched_pattern().search(text.encode()) is not None

"""Guesses the cause of a failure from the end of a log in which nothing known was found.

Evidence counts in this order: a known message at a level below error, an exception at the end of
the log or in the middle of a line, the message of an exception without its type, the exception that
the last source line raises, the known failure that an error message resembles (``similar.py``), and
its words (``keywords.toml``), at last those of all error messages together. Every guess has low
confidence. Without a line that reports an error there is no guess.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sm_train.toolkit.diagnose.log_scanner import is_step
from sm_train.toolkit.diagnose.matches import (
    PROGRAM_ERROR,
    Match,
    ScanReport,
    is_input_or_source,
    shows_continuation,
)
from sm_train.toolkit.diagnose.signatures import (
    is_programming_mistake,
    matching,
    matching_exception,
    signatures,
)
from sm_train.toolkit.diagnose.similar import MIN_SIMILARITY, most_similar
from sm_train.toolkit.diagnose.tracebacks import BEGIN

_LINES = 20
"""Lines at the end of a log in which a guess is looked for."""
_NEAR = 3
"""An error at most this many lines after a warning may be its consequence."""
_FAILED = re.compile(r"(?i:\bfail|\berror\b|\bcannot\b|\bunable\b)")
_WARNING = re.compile(r".{0,100}?(?<![=\w])WARNING\b")
# "*** ValueError: …", "(pid=812) …: KeyError: 'x'", "failed with RuntimeError: …"
_EMBEDDED = re.compile(
    r"(?:^|[\s(\[{'\"*:>])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: |\(['\"])\S.*)"
)
# "raise GatedRepoError(message, response) from e", "│ ❱ 88 │   raise ValueError("…")"
_RAISE = re.compile(r"(?:│ )?(?:❱ *)?(?:\d+ )?[│ ]*raise ((?:\w+\.)*[A-Z]\w*)\((.*)")
_STRING = re.compile(r"""f?["']([^"']{4,})""")
# "process exited with code 3": only that something failed
_EXIT_CODE = re.compile(
    r"(?i:\b(?:exit ?code|return ?code|exit status|exited with(?: code)?)\W{0,3}\d{1,3}\b"
    r"|\b(?:exited|exits|returned)\b[ =:]*\d{1,3}\W*$)"
)
_TOGETHER = 4
"""The last error and the lines after it are compared together if it resembles no known one."""


@dataclass(frozen=True)
class CauseWords:
    """The words of one cause: what a message is about, and what happened to it."""

    code: str
    subject: re.Pattern[str]
    event: re.Pattern[str]

    def score(self, text: str) -> int:
        """Return the number of different words in ``text``, 0 unless both kinds occur."""
        subjects = {found[0].lower() for found in self.subject.finditer(text)}
        events = {found[0].lower() for found in self.event.finditer(text)}
        return len(subjects | events) if subjects and events else 0


@cache
def words_by_cause() -> tuple[CauseWords, ...]:
    with Path(__file__).with_name("keywords.toml").open("rb") as file:
        rows = tomllib.load(file)["cause"]
    return tuple(
        CauseWords(
            row["code"],
            re.compile(row["subject"], re.IGNORECASE),
            re.compile(row["event"], re.IGNORECASE),
        )
        for row in rows
    )


def guessed_cause(text: str) -> str | None:
    """Return the code of the cause that a message resembles or whose words it has, else None."""
    code, similarity = most_similar(text)
    return code if similarity >= MIN_SIMILARITY else cause_by_words(text)


def cause_by_words(text: str) -> str | None:
    """Return the code of the cause with the most words in ``text``, None if none has any."""
    return _scored(text)[1]


def _scored(text: str) -> tuple[int, str | None]:
    best = max(words_by_cause(), key=lambda words: words.score(text))
    score = best.score(text)
    return score, best.code if score else None


def guess(report: ScanReport) -> Match | None:
    """Return a line that may show the cause, with its code and role; None without an error."""
    lines = _after_steps(report)
    errors = [line for line in lines if _is_error(line, report)]
    last = report.last_error()
    if not errors and last is None:
        others = [line for line in report.other_errors() if lines and line.order >= lines[0].order]
        errors = [line for line in others if _is_error(line, report)]
    if not errors or (last is not None and last.code != PROGRAM_ERROR):
        return last or _last_failed_call(lines) or _raised_exception(lines)
    return (
        _quiet_message(lines, errors)
        or last
        or _embedded_exception(errors)
        or _exception_without_type(errors)
        or _raised_exception(lines)
        or _unknown_message(lines, errors)
    )


def _after_steps(report: ScanReport) -> Sequence[Match]:
    """Return the last lines, from the one after the last training step."""
    raw = report.tail.split(b"\n")[:-1]
    first = report.lines - len(raw) + 1
    last_step = max((number for number, line in enumerate(raw, first) if is_step(line)), default=0)
    lines = [line for line in report.last_lines()[-_LINES:] if line.order > last_step]
    # NCCL repeats its last warning after this line; it says nothing of the program.
    repeated = {line.order + 1 for line in lines if line.text == "Last error:"}
    return [line for line in lines if line.order not in repeated]


def _is_error(line: Match, report: ScanReport) -> bool:
    return (
        report.is_error(line)
        and not shows_continuation(line.text)
        and _EXIT_CODE.search(line.text) is None
        # Echoes are known; they show no cause.
        and not matching(line.text)
    )


def _quiet_message(lines: Sequence[Match], errors: Sequence[Match]) -> Match | None:
    """Return a known message that was logged as a warning, shortly before an error."""
    for line in lines:
        near = any(0 < error.order - line.order <= _NEAR for error in errors)
        if not near or not _WARNING.match(line.text):
            continue
        if is_input_or_source(line.text) or shows_continuation(line.text):
            continue
        for signature in matching(line.text):
            if signature.role in ("cause", "symptom"):
                return replace(line, code=signature.code, role="symptom")
    return None


def _last_failed_call(lines: Sequence[Match]) -> Match | None:
    """Return the last line if it reports a failure that usually ends no job, as a missing EFA."""
    for signature in matching(lines[-1].text) if lines else ():
        if signature.role == "warning" and _FAILED.search(lines[-1].text):
            return replace(lines[-1], code=signature.code, role="symptom")
    return None


def _embedded_exception(errors: Sequence[Match]) -> Match | None:
    for line in reversed(errors):
        found = _EMBEDDED.search(line.text)
        if found is None:
            continue
        known = matching_exception(found[1])
        if known and known[0].role in ("echo", "warning"):
            continue
        if known:
            return replace(line, code=known[0].code, role=known[0].role)
        mistake = is_programming_mistake(found[1])
        code = PROGRAM_ERROR if mistake else guessed_cause(found[1]) or PROGRAM_ERROR
        return replace(line, code=code, role="exception")
    return None


def _exception_without_type(errors: Sequence[Match]) -> Match | None:
    """Return the last message that is known from exceptions, as "Error running job: cannot …"."""
    for line in reversed(errors):
        known = matching_exception(f"RuntimeError: {line.text}")
        if known and known[0].role not in ("echo", "warning"):
            return replace(line, code=known[0].code, role=known[0].role)
    return None


def _raised_exception(lines: Sequence[Match]) -> Match | None:
    """Return the source line that raises a known exception, as "raise GatedRepoError(message, …".

    The last line of the traceback is missing.
    """
    for line in reversed(lines):
        if (raised := _RAISE.match(line.text)) is None:
            continue
        message = _STRING.search(raised[2])
        known = matching_exception(f"{raised[1]}: {message[1] if message else '0'}")
        if known and known[0].role not in ("echo", "warning"):
            return replace(line, code=known[0].code, role=known[0].role)
    return None


def _is_known_or_source(text: str) -> bool:
    return bool(matching(text)) or is_input_or_source(text) or BEGIN in text


def _unknown_message(lines: Sequence[Match], errors: Sequence[Match]) -> Match | None:
    """Return the message that resembles a known failure most, or has the most words of one."""
    best = max(errors, key=lambda line: most_similar(line.text)[1])
    if most_similar(best.text)[1] < MIN_SIMILARITY:
        best = max(errors, key=lambda line: _scored(line.text)[0])
    code = guessed_cause(best.text)
    if code is None:
        # The message may be on the lines after the one that says "error".
        last = errors[-1].order
        after = [line.text for line in lines if line.order >= last][:_TOGETHER]
        is_new = len(after) > 1 and not any(map(_is_known_or_source, after))
        code = guessed_cause(" ".join(after)) if is_new else None
    return None if code is None else replace(best, code=code, role=signatures()[code].role)

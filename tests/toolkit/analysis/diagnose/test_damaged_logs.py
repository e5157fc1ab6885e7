"""A failed job's log never says "no failure", however it was cut, merged, prefixed or encoded."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from sm_train.toolkit.analysis.diagnose.diagnosis import NO_FAILURE, diagnose
from sm_train.toolkit.analysis.diagnose.line_patterns import SUCCESS
from sm_train.toolkit.analysis.diagnose.log_files import log_files
from sm_train.toolkit.base.errors import UserError

from tests.toolkit.analysis.diagnose.corpus_support import FORMS, line_prefix, lines_of
from tests.toolkit.analysis.diagnose.log_corpus import KnownLog, corpus
from tests.toolkit.analysis.diagnose.log_exports_support import PREFIXES

Lines = list[str]
FORMATS: dict[str, Callable[[Lines], str]] = {
    "plain": lambda lines: "".join(f"{line}\n" for line in lines),
    **FORMS,
    **{name: line_prefix(prefix) for name, prefix in PREFIXES.items()},
}
FAILED = [log for log in corpus() if log.nameable and lines_of(log) not in ([], [""])]
ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "utf-8": str.encode,
    "utf-16": lambda text: text.encode("utf-16"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "crlf": lambda text: text.replace("\n", "\r\n").encode(),
    "old Macintosh": lambda text: text.replace("\n", "\r").encode(),
    "latin-1": lambda text: text.encode("latin-1", "replace"),
}


def cut(lines: Lines, rng: random.Random) -> Lines:
    """Remove a part at the start, the end or in the middle, or characters of the last line."""
    first, last = sorted(rng.sample(range(len(lines) + 1), 2))
    end = rng.randrange(len(lines[-1]) + 1)
    return rng.choice(
        [
            lines[first:],
            lines[: max(1, last)],
            [*lines[:first], *lines[last:]],
            [*lines[:-1], lines[-1][:end]],
        ]
    )


def interleaved(lines: Lines, rng: random.Random) -> Lines:
    """Merge with the lines of another failed log, in the order of each."""
    both = [list(lines), lines_of(rng.choice(FAILED))]
    merged = []
    while any(both):
        merged.append(rng.choice([remaining for remaining in both if remaining]).pop(0))
    return merged


DAMAGES: dict[str, Callable[[Lines, random.Random], Lines]] = {
    "whole": lambda lines, rng: lines,
    "cut": cut,
    "interleaved": interleaved,
    "cut and interleaved": lambda lines, rng: interleaved(cut(lines, rng) or [""], rng),
}


def shows_success(text: str) -> bool:
    """Return whether a log says that training ended or that all steps are done."""
    return any(phrase in text for phrase in (*SUCCESS, "100%|", '"reason": "done"'))


def says_no_failure(path: Path, lines: Lines, format_name: str, encoding: str) -> bool:
    text = FORMATS[format_name](lines)
    path.write_bytes(ENCODINGS[encoding](text))
    try:
        found = diagnose(log_files([path]))
    except UserError:
        return False
    return found.cause == NO_FAILURE and not shows_success("\n".join(lines))


def wrong(path: Path, log: KnownLog, times: int) -> list[str]:
    """Return the damages after which ``log`` has "no failure"."""
    found = []
    for number in range(times):
        rng = random.Random(f"{log.name} {number}")
        damage, format_name = rng.choice(list(DAMAGES)), rng.choice(list(FORMATS))
        encoding = rng.choice(list(ENCODINGS))
        lines = DAMAGES[damage](lines_of(log), rng) or [""]
        if says_no_failure(path, lines, format_name, encoding):
            found.append(f"{log.name} {number}: {damage}, {format_name}, {encoding}")
    return found


def test_damaged_log_of_a_failed_job_never_has_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "export.log"
    assert not [text for log in FAILED[::12] for text in wrong(path, log, times=1)]


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_log_of_a_failed_job_never_has_no_failure(tenth: int, tmp_path: Path) -> None:
    path = tmp_path / "export.log"
    assert not [text for log in FAILED[tenth::10] for text in wrong(path, log, times=20)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gzip", "crlf", "latin-1"])
def test_answers_do_not_depend_on_the_encoding(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "export.log"
    for log in FAILED[::40]:
        path.write_bytes(ENCODINGS[encoding](FORMATS["plain"](lines_of(log))))
        assert diagnose(log_files([path])).cause == log.diagnose().cause

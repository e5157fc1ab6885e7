"""One word for each concept in everything that a user sees.

The list holds phrases that a reader has to translate, with the field's own term. It is compared
with the documentation, help texts, templates, failure signatures and the product's strings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("toolkit", "estimators", "cost", "entrypoints")

WORDS = {
    # phrase, as a regular expression → term to use
    r"mends?": "fix",
    r"words of (?:a|the) (?:job|log)": "log, message",
    r"is told(?: of)?|are told": "is reported, is logged",
    r"whole or not at all|whole or (?:are )?none": "atomic, complete",
    r"go(?:es)? on (?:with|from|at)|goes on": "resume, continue",
    r"by itself": "automatically",
    r"deals? out|dealt": "assigned, distributed",
    r"spoilt|is no number": "non-finite, NaN",
    r"stands? still": "pauses, waits",
    r"hand(?:s|ed)? over": "pass, transfer",
    r"dearest": "most expensive",
    r"left[- ]out captions?": "caption dropout",
    r"held against": "compared with",
    r"found fault with": "failed the check",
    r"is there already|are there already": "already exists",
    r"nobody to tell": "no notification target",
    r"carried over to": "extrapolated to",
    r"the least IAM": "least-privilege IAM",
    r"what (?:it|they) said": "its log",
    r"minds? the budget": "enforce the budget",
    r"what would go wrong": "preflight checks",
    r"here and there": "locally and on SageMaker",
    r"the batch stays": "the effective batch size is preserved",
    r"8 of 10 outcomes": "P10–P90 (80 % interval)",
    r"without knowing which": "blind",
    r"draws? images from": "generate, sample images",
    r"an end and a checkpoint|a checkpoint and an end": "save a checkpoint and stop",
    r"machine(?:s)? of (?:a|the) (?:cluster|job)": "node, instance",
    r"look once|two looks|only look:": "check once, polling interval",
    r"chunks? of samples|runs? of samples": "read range",
    r"carr(?:y|ies) SMDDP": "include SMDDP",
    r"master node|slave": "first node, worker",
    r"per_gpu_batch|warmup_iterations|gradient_clip\b|iterations_per_second": "the run file's key",
    r"taken up again|takes? up again": "resume",
    r"refused samples?": "rejected samples",
}
"""Phrase to avoid → term to use (CONTRIBUTING.md, Language)."""

ALLOWED: dict[str, set[str]] = {}
"""File → phrases that it may hold, with the reason."""

PATTERNS = {phrase: re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE) for phrase in WORDS}


def documents() -> Iterator[tuple[str, int, str]]:
    """Yield file, line number and text of documentation, templates and tables of messages."""
    paths = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docs/site/*.py"),
        *(ROOT / "toolkit" / "presets").iterdir(),
        *(ROOT / "toolkit" / "templates").iterdir(),
        *ROOT.glob("toolkit/**/*.toml"),
    ]
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield path.relative_to(ROOT).as_posix(), number, line


def strings() -> Iterator[tuple[str, int, str]]:
    """Yield every string of the product's code that may be shown: messages, help and docstrings."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield name, node.lineno, node.value


def violations(texts: Iterator[tuple[str, int, str]]) -> list[str]:
    return [
        f"{name}:{number}: {found[0]!r} → {WORDS[phrase]}"
        for name, number, text in texts
        for phrase, pattern in PATTERNS.items()
        if phrase not in ALLOWED.get(name, set())
        for found in pattern.finditer(text)
    ]


def test_documents_use_the_terms() -> None:
    assert violations(documents()) == []


def test_strings_in_the_code_use_the_terms() -> None:
    assert violations(strings()) == []


def test_exceptions_are_needed() -> None:
    """An exception that no text needs any more would hide the next violation."""
    texts = [*documents(), *strings()]
    unused = [
        (name, phrase)
        for name, phrases in ALLOWED.items()
        for phrase in phrases
        if not any(module == name and PATTERNS[phrase].search(text) for module, _, text in texts)
    ]
    assert unused == []


@pytest.mark.parametrize(
    "text",
    ["The suggested mend", "the run goes on at step 5", "restarts by itself", "Dealt out by key"],
)
def test_phrases_are_found(text: str) -> None:
    assert len(violations(iter([("some.py", 1, text)]))) >= 1


def test_no_variable_is_named_one() -> None:
    """A loop variable says what it is: a stage, a rank, a shard."""
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in (*FOLDERS, "benchmarks", "docs", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Name) and node.id == "one")
        or (isinstance(node, ast.arg) and node.arg == "one")
    ]
    assert named == []

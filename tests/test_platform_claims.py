"""docs/platform.md: every statement names an existing test, or what only AWS can prove."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from sm_train.toolkit.probes.doctor.canary_report import FactCode

ROOT = Path(__file__).parents[1]
NONE = "—"
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (ROOT / "docs" / "platform.md").read_text().partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| statement ")
]

GUARANTEES = [
    (guarantee, cell)
    for line in (ROOT / "docs" / "platform.md")
    .read_text()
    .partition("## Guarantees by platform")[2]
    .partition("\n## ")[0]
    .splitlines()
    if line.startswith("| ") and not line.startswith("| guarantee ")
    for guarantee, *cells in [[each.strip() for each in line.strip("|").split("|")]]
    for cell in cells
]

PLATFORM = re.compile(
    r"\b(SageMaker|AWS|S3|CloudWatch|FastFile|Lambda|IAM|EFA|SMDDP|SIGTERM|spot)\b"
)
README_STATEMENTS = {
    "Train a foundation diffusion model": "`submit` trains on SageMaker from a laptop",
    "The price needs no AWS account": (
        "`--dry-run`, `check --offline` and `cost` need no AWS account"
    ),
    "no GPU, no AWS account": "`--dry-run`, `check --offline` and `cost` need no AWS account",
    "your own photos to the first AWS job": "`submit` trains on SageMaker from a laptop",
    "No server, no database": "A run is found by its name, from any laptop",
    "`template` for Lambda": "Packing in Lambda packs each image once",
}
"""Part of each sentence about the platform in the README → the statement that covers it."""


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "proof", "question"), ROWS)
def test_statement_is_proven_or_left_to_aws(statement: str, proof: str, question: str) -> None:
    assert (proof, question) != (NONE, NONE)
    if proof != NONE:
        assert_exists(proof)
    for code in re.findall(r"canary `([^`]+)`", question):
        assert code in get_args(FactCode)


def assert_exists(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in tests, f"{path} has no {name}"


def test_each_guarantee_has_a_test_on_each_platform_or_a_reason() -> None:
    assert len(GUARANTEES) % 4 == 0
    assert len(GUARANTEES) >= 4 * 12
    for guarantee, cell in GUARANTEES:
        if not cell.startswith(f"{NONE} "):
            assert_exists(cell)
        else:
            assert len(cell.removeprefix(f"{NONE} ")) > 10, guarantee


def test_readme_states_nothing_about_the_platform_that_is_not_covered() -> None:
    text = (ROOT / "README.md").read_text()
    # Not code, images, the comparison with other tools, or the titles of pages.
    for left_out in (
        r"```.*?```",
        r"!\[[^]]*\]",
        r"\n## Why\n.*?(?=\n## )",
        r"\n## Documentation\n.*",
    ):
        text = re.sub(left_out, "\n\n", text, flags=re.DOTALL)
    sentences = [
        " ".join(sentence.split())
        for block in re.split(r"\n\s*\n|\n(?=[-|#] ?)", text)
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`])", block)
        if PLATFORM.search(sentence)
    ]
    uncovered = [
        sentence
        for sentence in sentences
        if not any(part in sentence for part in README_STATEMENTS)
    ]
    assert sentences
    assert uncovered == [], "add a row to docs/platform.md, and the sentence to this test"
    assert set(README_STATEMENTS.values()) <= {row[0] for row in ROWS}

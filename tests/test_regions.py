"""No region is assumed where something is looked for, changed or deleted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
DEFAULTS = {"DEFAULT_REGION", "REFERENCE_REGION"}

REASONS = {
    "entrypoints/storage/store.py": "S3 reports us-east-1 as no location",
    "toolkit/aws/s3.py": "S3 of any region names the region of a bucket",
    "toolkit/aws/session.py": "prices are shown without an account; the screen names their region",
    "toolkit/clusters/node_records/find_cluster_run.py": "S3 of any region names a bucket's",
    "toolkit/init/wizard.py": "a proposal that the user confirms",
    "toolkit/analysis/review/build.py": "the price of a log without a job; its region is shown",
}
"""Files with a fallback, and why it decides nothing in AWS."""


def is_region(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and REGION.fullmatch(node.value) is not None
    return isinstance(node, ast.Name) and node.id in DEFAULTS


def fallbacks(tree: ast.AST) -> Iterator[int]:
    """Yield the lines in which a region stands in for one that is not known."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.BoolOp):
            found = list(node.values)
        elif isinstance(node, ast.IfExp):
            found = [node.body, node.orelse]
        elif isinstance(node, ast.arguments):
            found = [*node.defaults, *node.kw_defaults]
        elif isinstance(node, ast.ExceptHandler):
            found = [
                inner.value
                for inner in ast.walk(node)
                if isinstance(inner, ast.Assign | ast.Return | ast.AnnAssign)
            ]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found = node.args[1:] if node.func.attr in ("get", "getenv") else []
        for value in found:
            if is_region(value):
                assert value is not None
                yield value.lineno


def test_regions_are_fallbacks_only_where_they_decide_nothing() -> None:
    found: dict[str, list[int]] = {}
    for folder in ("toolkit", "estimators", "entrypoints", "cost"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if lines := sorted(set(fallbacks(ast.parse(path.read_text())))):
                found[path.relative_to(ROOT).as_posix()] = lines
    assert found.keys() == REASONS.keys(), found


def test_each_form_of_a_fallback_is_found() -> None:
    for source in (
        'region = option or "us-east-1"',
        'region = option if option else "eu-west-1"',
        'def f(region="us-east-1"): pass',
        "def f(*, region=DEFAULT_REGION): pass",
        'region = environment.get("AWS_REGION", "us-east-1")',
        'try:\n    f()\nexcept OSError:\n    region = "us-east-1"',
    ):
        assert list(fallbacks(ast.parse(source))), source
    assert not list(fallbacks(ast.parse('print("us-east-1")')))

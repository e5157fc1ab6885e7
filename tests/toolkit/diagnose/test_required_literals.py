"""Tests that the literals derived from an expression are in every text that it matches."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.toolkit.diagnose.required_literals import required_literals
from sm_train.toolkit.diagnose.signatures import signatures


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        (r"^Killed$", {"Killed"}),
        (r"NVRM: Xid \([^)]*\): 79,", {"NVRM: Xid ("}),
        (r"[Oo]ut of memory", {"Out of memory", "out of memory"}),
        (r"Too many (?:files|processes)", {"Too many files", "Too many processes"}),
        (r"a?bc|xyz{2,3}", {"bc", "abc", "xy"}),
        (r"(?:first|second)\d+ end", {"first", "second"}),
        (r"(?!x)warning(?: \d+)?", {"warning"}),
        (r"(?i:any case) and exact", {" and exact"}),
    ],
)
def test_literals_of_an_expression(pattern: str, literals: set[str]) -> None:
    assert required_literals(pattern) == literals


@pytest.mark.parametrize("pattern", [r"\d+", r".*", r"(?i:error)", r"x", r"error|\d+"])
def test_expression_without_fixed_text_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="every match contains"):
        required_literals(pattern)


@pytest.mark.parametrize("code", [code for code, one in signatures().items() if one.regex])
@settings(max_examples=15)
@given(st.data())
def test_every_match_of_a_signature_contains_a_literal(code: str, data: st.DataObject) -> None:
    signature = signatures()[code]
    assert signature.regex is not None
    text = data.draw(st.from_regex(re.compile(signature.regex.pattern, re.ASCII)))
    assert any(literal in text for literal in signature.literals)

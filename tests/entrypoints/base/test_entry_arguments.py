"""Arguments of a custom script: replaced placeholders and unchanged text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sm_train.entrypoints.job_interface.job_config import (
    PLACEHOLDERS,
    RESUME,
    placeholders,
    resolve,
)

from tests.support.run_documents import config

VALUES = {name: f"<{name}>" for name in PLACEHOLDERS} | {"channel.train": "/data"}
WITHOUT = {name: value for name, value in VALUES.items() if name != RESUME}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--out", "{checkpoints}/a", "{channel.train}"], ["--out", "<checkpoints>/a", "/data"]),
        (["{{stage}}", "{{{stage}}}"], ["{stage}", "{{stage}}"]),
        (['{"a": {"b": 1}}', "{epoch:02d}", "{}"], ['{"a": {"b": 1}}', "{epoch:02d}", "{}"]),
        (["--resume", "{resume}"], ["--resume", "<resume>"]),
        (["{stage}{seed}"], ["<stage><seed>"]),
    ],
)
def test_placeholders_are_replaced(arguments: list[str], expected: list[str]) -> None:
    assert resolve(arguments, VALUES) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--seed", "1", "--resume", "{resume}", "--x"], ["--seed", "1", "--x"]),
        (["--resume={resume}", "--x"], ["--x"]),
        (["--flag=1", "{resume}"], ["--flag=1"]),
        (["positional", "{resume}"], ["positional"]),
        (["{resume}", "{resume}"], []),
        (["--a", "--resume={resume}"], ["--a"]),
    ],
)
def test_without_a_checkpoint_its_option_is_left_out(
    arguments: list[str], expected: list[str]
) -> None:
    assert resolve(arguments, WITHOUT) == expected


@given(st.lists(st.text()))
def test_text_without_a_placeholder_is_unchanged(arguments: list[str]) -> None:
    plain = [
        argument for argument in arguments if not placeholders(argument) and "{{" not in argument
    ]
    assert resolve(plain, WITHOUT) == plain


def test_arguments_are_checked_when_the_run_file_is_read() -> None:
    own = {"code": ".", "entry": "own.py"}
    run = config(**own, entry_args=["--steps", 100, "--lr", 1e-4, "{channel.own}"])
    assert run.entry_args == ("--steps", "100", "--lr", "0.0001", "{channel.own}")
    for arguments, message in {
        ("{chekpoints}",): r"unknown placeholder {chekpoints}; known are {stage}.*{{chekpoints}}",
        (True,): "is a truth value",
        ("a\0b",): "null character",
    }.items():
        with pytest.raises(ValidationError, match=message):
            config(**own, entry_args=list(arguments))
    with pytest.raises(ValidationError, match="requires entry"):
        config(entry_args=["--x"])

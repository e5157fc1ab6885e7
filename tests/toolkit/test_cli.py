"""The command line ends quietly when the reader of its output does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.support.deadline import DEADLINE
from tests.support.run_files import write_run

COMMANDS: dict[str, Sequence[str]] = {
    "schema": ["schema"],
    "cost_table": ["cost", "run.yaml", "--explain"],
    "cost_json": ["cost", "run.yaml", "--json"],
    "help": ["submit", "--help"],
    "plan": ["submit", "run.yaml", "--dry-run"],
    "error": ["cost", "missing.yaml"],
}


@pytest.mark.parametrize("errors", ["errors_shown", "errors_in_pipe"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_pipe_is_not_an_error(tmp_path: Path, name: str, errors: str) -> None:
    """As in ``sm-train schema | head -0``: the reader has ended before the first line."""
    write_run(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "sm_train.toolkit", *COMMANDS[name]],
        stdout=writer,
        stderr=writer if errors == "errors_in_pipe" else subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # Buffered, as for users: a short output reaches the pipe when the command has ended.
        env=clean_environment(tmp_path) | {"PYTHONUNBUFFERED": ""},
        timeout=DEADLINE,
        check=False,
    )
    os.close(writer)
    expected = 2 if name == "error" else 0
    assert process.returncode == expected, process.stderr
    assert "Traceback" not in (process.stderr or "")
    assert "Broken" not in (process.stderr or "")

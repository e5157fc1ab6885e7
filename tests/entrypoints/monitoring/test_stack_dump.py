"""Stacks of a process that hangs: py-spy's where it is installed, else by a signal."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from sm_train.entrypoints.monitoring import stack_dump


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder in which programs are found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


def test_without_py_spy_there_is_no_dump(programs: Path) -> None:
    assert stack_dump._py_spy(os.getpid(), 5.0) == ""


def test_a_dump_that_fails_is_tried_three_times(programs: Path) -> None:
    """py-spy reads a running process without stopping it, and may meet a stack that changes."""
    tries, program = programs / "tries", programs / "py-spy"
    program.write_text(
        f'#!/bin/sh\necho x >> {tries}\n[ "$(/usr/bin/wc -l < {tries})" -lt 3 ] && exit 1\n'
        "echo 'Thread 1 (idle)'\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    assert stack_dump._py_spy(os.getpid(), 30.0) == "Thread 1 (idle)\n"
    tries.unlink()
    program.write_text(f"#!/bin/sh\necho x >> {tries}\nexit 1\n")
    assert stack_dump._py_spy(os.getpid(), 30.0) == ""
    assert tries.read_text().count("x") == 3

"""Ctrl-C at a question ends the command, also right after the question appears."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.toolkit.commands.terminal_process import terminal_process

ASK = """
from sm_train.toolkit.terminal.confirmation import ask
for number in range(int(sys.argv[1])):
    try:
        ask(f"Question {number}?")
    except KeyboardInterrupt:
        print(f"interrupted {number}.", flush=True)
"""


# Reading without waiting loses about one in 300.
@pytest.mark.parametrize("times", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_interrupt_of_a_question_is_lost(tmp_path: Path, times: int) -> None:
    with terminal_process([str(times)], cwd=tmp_path, program=ASK) as process:
        for number in range(times):
            process.expect(f"Question {number}? [y/N]:")
            process.send("y\x03")
            process.expect(f"interrupted {number}.")
        assert process.finish() == 0

"""The tools of the tiers: the limit of a whole run, and the times of folders and tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.deadline import DEADLINE

HERE = Path(__file__).parent

HANGING = """
import subprocess, sys, threading
def wait_for_ever():
    threading.Event().wait()
if len(sys.argv) < 2:
    subprocess.Popen([sys.executable, __file__, "child"])
wait_for_ever()
"""


def limited(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the limit as its first argument."""
    return subprocess.run(
        [sys.executable, str(HERE / "time_limit.py"), *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def test_run_beyond_its_limit_ends_with_the_stacks_of_all_processes(tmp_path: Path) -> None:
    program = tmp_path / "hanging.py"
    program.write_text(HANGING)
    ended = limited("5", sys.executable, str(program))
    assert ended.returncode == 124
    assert f"{program} child" in ended.stdout
    assert ended.stdout.count("wait_for_ever (hanging.py") == 2, ended.stdout
    running = subprocess.run(["pgrep", "-f", str(program)], capture_output=True, check=False)
    assert running.stdout == b"", "a process was left"


def test_exit_code_within_the_limit_is_that_of_the_command() -> None:
    assert limited("60", sys.executable, "-c", "raise SystemExit(3)").returncode == 3


def test_times_are_summed_by_folder(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite name="pytest">'
        '<testcase classname="tests.toolkit.packing.test_pack" name="test_a" time="2.5"/>'
        '<testcase classname="tests.toolkit.packing.test_index" name="test_b[x]" time="1.5"/>'
        '<testcase classname="tests.test_docs" name="test_c" time="0.25"/>'
        "</testsuite></testsuites>"
    )
    ran = subprocess.run(
        [sys.executable, str(HERE / "times.py"), str(report)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "     2        4  toolkit/packing\n" in ran.stdout
    assert "     2.5  tests/toolkit/packing/test_pack.py::test_a\n" in ran.stdout

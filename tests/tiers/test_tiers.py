"""The tools of the tiers: the limit of a whole run, and the times of folders and tests."""

from __future__ import annotations

import os
import re
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
    (tmp_path / "conftest.py").write_text(
        "from tests.tiers.cpu_time import CpuTime\n\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(CpuTime())\n"
    )
    (tmp_path / "test_busy.py").write_text(
        "import subprocess, sys, time\n\n"
        "WORK = 'import time\\nwhile time.process_time() < 0.5: pass'\n\n"
        "def test_in_a_process():\n    subprocess.run([sys.executable, '-c', WORK])\n\n"
        "def test_that_waits():\n    time.sleep(0.5)\n"
    )
    report = tmp_path / "report.xml"
    root = HERE.parents[1]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", f"--junitxml={report}", f"--rootdir={tmp_path}", tmp_path],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    [most, least] = re.findall(r"^ +([\d.]+) s  test_busy.py::(\w+)$", ran.stdout, re.MULTILINE)
    assert (most[1], least[1]) == ("test_in_a_process", "test_that_waits")
    assert float(most[0]) >= 0.5 > float(least[0]) + 0.25
    assert "minutes of CPU in tests" in ran.stdout
    times = subprocess.run(
        [sys.executable, str(HERE / "times.py"), str(report)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{most[0]:>8}  test_busy.py::test_in_a_process\n" in times.stdout
    assert re.search(r"^     2 +\d+  tests$", times.stdout, re.MULTILINE)


def test_processor_time_of_a_run_is_printed() -> None:
    ran = limited("60", sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass")
    assert ran.stdout == "0.0 minutes of CPU\n"

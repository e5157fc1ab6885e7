"""Measures the processor time of each test with its processes, and prints which used most."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.reports import TestReport

PROPERTY = "cpu_seconds"
"""The property of a test in pytest's JUnit report."""

_MOST = 10


class CpuTime:
    """A pytest plugin: records the processor time that passes until the next test begins."""

    def __init__(self) -> None:
        self._used = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._used = _cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        # The report of the teardown carries the properties; other processes of a test have ended.
        if call.when == "teardown":
            item.user_properties.append((PROPERTY, f"{_cpu_seconds() - self._used:.2f}"))
        return (yield)

    def pytest_sessionfinish(self) -> None:
        """End the fork server, so that its time is part of what this process has waited for."""
        forkserver._forkserver._stop()  # type: ignore[attr-defined]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the processor time of all tests, and of those that used most."""
        used: Counter[str] = Counter()
        reports: list[TestReport] = [
            report for reports in terminalreporter.stats.values() for report in reports
        ]
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY:
                    used[report.nodeid] += float(value)
        terminalreporter.write_sep("=", f"{used.total() / 60:.1f} minutes of CPU in tests")
        for test, seconds in used.most_common(_MOST):
            terminalreporter.write_line(f"{seconds:6.1f} s  {test}")


def _cpu_seconds() -> float:
    """Return the processor time of this process, of ended children and of the fork server's."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    if server is None:
        return seconds
    # utime, stime, cutime and cstime, in clock ticks (proc_pid_stat(5)).
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[11:15]
    return seconds + sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")

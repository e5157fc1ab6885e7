"""Folders of heartbeats, and the processes that left them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from sm_train.entrypoints.common import procfs
from sm_train.entrypoints.monitoring.heartbeat import stale_dirs


def test_launcher_of_a_system_without_proc_counts_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS: the folder of a launcher that lives must not be removed."""
    monkeypatch.setattr(procfs, "_PROC", tmp_path / "proc")
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert procfs.state(os.getpid()) == procfs.UNKNOWN
    assert procfs.state(ended.pid) == "X"
    for pid in (os.getpid(), ended.pid):
        (tmp_path / f"sm-train-{os.getuid()}-{pid}-0").mkdir(mode=0o700)
    assert stale_dirs(tmp_path / "sm-train-x") == [
        tmp_path / f"sm-train-{os.getuid()}-{ended.pid}-0"
    ]

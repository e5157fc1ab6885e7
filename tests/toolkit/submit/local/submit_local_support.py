"""Helpers of the tests of submit local, which other tests use as well."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import yaml

from tests.support.cluster.training_jobs import tiny_run


def write_tiny(folder: Path, **settings: object) -> Path:
    document = tiny_run(**settings).model_dump(mode="json")  # type: ignore[arg-type]
    document["data"]["local"] = "shards"
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that still run below ``folder``."""
    running = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if str(folder) in str(process.info["cwd"]) and process.pid != os.getpid():
            running.append(process)
    return running

"""Examines the cluster before training: runs the doctor's process next to this one and waits.

Each training process starts one, before it creates its own process group;
:mod:`sm_train.entrypoints.probes.worker` explains why it is separate. Its time is bounded, whatever
happens in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig
from sm_train.entrypoints.job_interface.job_config import JobConfig

Mode = Literal["fail", "warn", "off"]

GRACE_SECONDS = 30.0
"""Added to the doctor's own timeout: starting Python, and handing out the verdict."""


class UnfitClusterError(RuntimeError):
    """The run file forbids training on such a cluster; the message is one line."""


def effective_mode(config: JobConfig, resources: ResourceConfig) -> Mode:
    """Return the run file's mode; ``auto`` warns on several instances and is otherwise off."""
    mode = config.doctor.mode
    if mode != "auto":
        return mode
    on_instances = resources.instance_type is not None
    return "warn" if on_instances and len(resources.hosts) > 1 else "off"


def examine(config: JobConfig, document: Path, *, fail: bool) -> str:
    """Run the doctor until it ends; returns its sentence.

    Raises:
        UnfitClusterError: ``fail`` is set, and the verdict is bad or there is none.
    """
    timeout = config.doctor.timeout + GRACE_SECONDS
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        path = Path(folder) / "verdict.json"
        command = [sys.executable, "-m", "sm_train.entrypoints.probes.worker"]
        command += ["--stage", config.stage.name, "--document", str(document.absolute())]
        command += ["--verdict", str(path)]
        # The child imports the same modules as this process, wherever they were found.
        python_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        # torch logs pages about a lost store; the verdict reports it in one line.
        environment = os.environ | {"PYTHONPATH": python_path, "TORCH_CPP_LOG_LEVEL": "FATAL"}
        missing = "the doctor is not in this bundle"
        if find_spec("sm_train.entrypoints.probes") is not None:
            missing = f"no verdict within {timeout:.0f} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, env=environment, timeout=timeout, check=False)
        try:
            verdict = json.loads(path.read_bytes())
        except (OSError, ValueError):
            verdict = {"level": "fail", "sentence": missing}
    sentence: str = verdict["sentence"]
    if fail and verdict["level"] == "fail":
        raise UnfitClusterError(
            f"the doctor finds the cluster unfit: {sentence}; set doctor.mode: warn to train anyway"
        )
    return sentence

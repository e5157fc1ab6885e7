"""Examines the cluster before training: starts the doctor's process beside this one and waits.

Each training process starts one (:mod:`sm_train.entrypoints.doctor.worker` says why it is apart),
bounded in time whatever happens in it, before training joins its own process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig

Mode = Literal["fail", "warn", "off"]

GRACE_SECONDS = 30.0
"""Beyond the doctor's own limit: for starting Python and for the farewell."""


class UnfitClusterError(RuntimeError):
    """The run file says not to train on such a cluster; the message is one line."""


def mode(settings: JobConfig, hosts: ResourceConfig) -> Mode:
    """What the run file says; by itself: warn on several real machines, off elsewhere."""
    said = settings.doctor.mode
    if said != "auto":
        return said
    real = hosts.instance_type is not None
    return "warn" if real and len(hosts.hosts) > 1 else "off"


def examine(settings: JobConfig, document: Path, *, fail: bool) -> str:
    """Run the doctor to its end; returns its sentence.

    Raises:
        UnfitClusterError: ``fail``, and the verdict is bad or never came.
    """
    limit = settings.doctor.timeout + GRACE_SECONDS
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        verdict = Path(folder) / "verdict.json"
        command = [sys.executable, "-m", "sm_train.entrypoints.doctor.worker"]
        command += ["--stage", settings.stage.name, "--document", str(document.absolute())]
        command += ["--verdict", str(verdict)]
        # The same modules as here, wherever they were found.
        path = os.pathsep.join(one or str(Path.cwd()) for one in sys.path)
        # What libraries say of a store that is gone is pages long, and the verdict says it too.
        environment = os.environ | {"PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "FATAL"}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=environment, timeout=limit, check=False)
        try:
            told = json.loads(verdict.read_bytes())
        except (OSError, ValueError):
            told = {"level": "fail", "sentence": f"no verdict within {limit:.0f} s"}
    if fail and told["level"] == "fail":
        raise UnfitClusterError(
            f"the doctor finds the cluster unfit: {told['sentence']}; doctor.mode: warn trains all "
            "the same"
        )
    sentence: str = told["sentence"]
    return sentence

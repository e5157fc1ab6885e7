"""Weights & Biases: online with an API key, else files for `wandb sync`."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.job_interface.job_config import TrackerConfig
from sm_train.entrypoints.tracking.scalars import IMAGE_TAG
from sm_train.entrypoints.tracking.tracker import LastSteps, Warn

_STEP = "step"
"""The metric that is the x axis of all others: W&B's own step cannot be set when offline."""


class WandbTracker:
    """A :class:`~sm_train.entrypoints.tracking.tracker.Tracker` of W&B's client.

    The key is passed as an argument: the client would write it to ``~/.netrc`` otherwise, and its
    service would inherit an environment variable.
    """

    def __init__(
        self, settings: TrackerConfig, run: str, run_id: str, folder: Path, key: str | None
    ) -> None:
        self._settings, self._run_name, self._run_id = settings, run, run_id
        self._folder, self._key = folder, key
        self._run: Any = None
        self._last_steps: LastSteps = {}

    def open(self, config: Mapping[str, Any], warn: Warn) -> LastSteps:
        # Reports to the vendor about errors of the client.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        self._folder.mkdir(parents=True, exist_ok=True)
        # A copy of what was logged: an offline run cannot be read back.
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._last_steps = json.loads(self._steps_file.read_text(encoding="utf-8"))
        try:
            self._run = self._init(config, "offline" if self._key is None else "online")
        except Exception as error:
            if self._key is None:
                raise
            warn(
                f"{type(error).__name__}: {error}; the run is written to files, upload them with "
                "`wandb sync`"
            )
            self._run = self._init(config, "offline")
        return self._steps()

    def _steps(self) -> LastSteps:
        """Define the x axis; return the last steps, which the server may know better."""
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        summary = dict(self._run.summary)
        known = summary.get(_STEP)
        if isinstance(known, int | float):
            for tag in summary.keys() - {_STEP}:
                if not tag.startswith("_"):
                    self._last_steps[tag] = max(int(known), self._last_steps.get(tag, 0))
        return dict(self._last_steps)

    @property
    def _steps_file(self) -> Path:
        return self._folder / "last-steps.json"

    def _init(self, config: Mapping[str, Any], mode: str) -> Any:
        wandb: Any = importlib.import_module("wandb")
        options = {
            "api_key": self._key,
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "mode": mode,
            # SageMaker uploads files; it does not need links to them.
            "symlink": False,
            # The client would take the job's name for the run's id.
            "sagemaker_disable": True,
            "silent": True,
            "x_save_requirements": False,
        }
        if self._settings.uri is not None:
            options["base_url"] = self._settings.uri
        return wandb.init(
            project=self._settings.project or self._run_name,
            entity=self._settings.entity,
            id=self._run_id,
            name=self._run_id,
            dir=str(self._folder.parent),
            resume="allow",
            config=dict(config),
            allow_val_change=True,
            settings=wandb.Settings(**options),
        )

    def log_scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._log(step, time, values)

    def log_image(self, step: int, time: float, content: bytes) -> None:
        from PIL import Image

        wandb: Any = importlib.import_module("wandb")
        self._log(step, time, {IMAGE_TAG: wandb.Image(Image.open(io.BytesIO(content)))})

    def _log(self, step: int, time: float, values: Mapping[str, Any]) -> None:
        # Before the values: a process that is killed in between loses them, but repeats none.
        self._last_steps |= dict.fromkeys(values, step)
        write_atomic(self._steps_file, json.dumps(self._last_steps).encode())
        self._run.log({**values, _STEP: step, "_timestamp": time})

    def close(self, reason: str | None) -> None:
        self._run.finish(exit_code=int(reason is None))
        # `finish` does not wait until the client's service has written its last block. The service
        # ends with this process, which ends without the client's exit hook.
        wandb: Any = importlib.import_module("wandb")
        wandb.teardown()

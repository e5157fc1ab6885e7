"""MLflow: a tracking server, SageMaker's managed one, or files."""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm_train.entrypoints.job_interface.job_config import TrackerConfig
from sm_train.entrypoints.tracking.scalars import IMAGE_TAG
from sm_train.entrypoints.tracking.tracker import LastSteps, Warn

_RUN_TAG = "sm_train.run"
"""Tag by which a resumed job finds its run."""

_STATES = {"done": "FINISHED", "sigterm": "KILLED", None: "FAILED"}


class MlflowTracker:
    """A :class:`~sm_train.entrypoints.tracking.tracker.Tracker` of MLflow's client.

    ``key`` is a bearer token, or a JSON object with ``username`` and ``password``. The tracking
    server of an ARN needs none: the plugin ``sagemaker-mlflow`` signs requests with the job's role.
    """

    def __init__(
        self, settings: TrackerConfig, run: str, run_id: str, folder: Path, key: str | None
    ) -> None:
        self._settings, self._run_name, self._run_id = settings, run, run_id
        self._folder, self._key = folder, key
        self._client: Any = None
        self._mlflow_id = ""

    def open(self, config: Mapping[str, Any], warn: Warn) -> LastSteps:
        # MLflow 3.7 made files opt-in; its database needs packages of the server.
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        mlflow: Any = importlib.import_module("mlflow")
        if self._key is not None:
            # Once: a second attempt to open the run would send it twice.
            _authorize(self._key)
            self._key = None
        uri = self._settings.uri
        if uri is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            uri = self._folder.resolve().as_uri()
        self._client = mlflow.MlflowClient(uri)
        experiment = self._experiment(self._settings.project or self._run_name)
        found = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{self._run_id}'")
        if found:
            run = found[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = self._client.create_run(
                experiment, run_name=self._run_id, tags={_RUN_TAG: self._run_id}
            )
        self._mlflow_id = run.info.run_id
        # A parameter cannot change; the number of instances may after a resume.
        new = {key: value for key, value in config.items() if key not in run.data.params}
        param: Any = importlib.import_module("mlflow.entities").Param
        params = [param(key, str(value)[:500]) for key, value in new.items()]
        self._client.log_batch(self._mlflow_id, params=params)
        return self._read_last_steps(run)

    def _experiment(self, name: str) -> str:
        existing = self._client.get_experiment_by_name(name)
        if existing is not None:
            return str(existing.experiment_id)
        return str(self._client.create_experiment(name))

    def _read_last_steps(self, run: Any) -> LastSteps:
        last = {}
        for tag in run.data.metrics:
            last[tag] = max(
                metric.step for metric in self._client.get_metric_history(self._mlflow_id, tag)
            )
        images = self._client.list_artifacts(self._mlflow_id, IMAGE_TAG)
        steps = [int(Path(image.path).stem.removeprefix("step-")) for image in images]
        return last | ({IMAGE_TAG: max(steps)} if steps else {})

    def log_scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        metric: Any = importlib.import_module("mlflow.entities").Metric
        metrics = [metric(tag, value, int(time * 1e3), step) for tag, value in values.items()]
        self._client.log_batch(self._mlflow_id, metrics=metrics)

    def log_image(self, step: int, time: float, content: bytes) -> None:
        from PIL import Image

        image = Image.open(io.BytesIO(content))
        self._client.log_image(self._mlflow_id, image, f"{IMAGE_TAG}/step-{step:08d}.png")

    def close(self, reason: str | None) -> None:
        self._client.set_terminated(self._mlflow_id, _STATES.get(reason, "FAILED"))


def _authorize(key: str) -> None:
    """Send the key with each request, without an environment variable that processes inherit."""
    providers: Any = importlib.import_module(
        "mlflow.tracking.request_header.abstract_request_header_provider"
    )
    registry: Any = importlib.import_module("mlflow.tracking.request_header.registry")
    header = _authorization(key)

    class Authorization(providers.RequestHeaderProvider):  # type: ignore[misc]
        def in_context(self) -> bool:
            return True

        def request_headers(self) -> dict[str, str]:
            return {"Authorization": header}

    registry._request_header_provider_registry.register(Authorization)


def _authorization(key: str) -> str:
    """Return the header of a token, or of a JSON object with user name and password."""
    if key.startswith("{"):
        pair = json.loads(key)
        text = f"{pair['username']}:{pair['password']}"
        return f"Basic {base64.b64encode(text.encode()).decode()}"
    return f"Bearer {key}"

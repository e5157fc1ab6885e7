"""The CronJob that watches a run from outside of its pods."""

from __future__ import annotations

from typing import Any

from sm_train.estimators.config.platforms import MAX_CRON_NAME
from sm_train.estimators.manifests.pod import fetch_code, secret_variables, watch_command
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import StageJob, is_watched
from sm_train.estimators.manifests.volumes import (
    CHECKPOINT_VOLUME,
    WORK_FOLDER,
    WORK_VOLUME,
    PodVolumes,
)

_SECONDS = 300
"""Time for one check, with the download of the code and the installation of packages."""


def watcher_name(job: StageJob) -> str | None:
    """Return the name of the run's CronJob; None if there is nothing that it could do."""
    kubernetes = job.config.kubernetes
    is_useful = is_watched(job.config, kubernetes.watch_schedule, kubernetes.secrets)
    return f"{job.name}-watch" if is_useful else None


def watcher(job: StageJob, volumes: PodVolumes) -> list[dict[str, Any]]:
    """Return the CronJob with the code, the variables and the secrets of the run's pods, or none.

    Its pods need no GPU, and have other labels than the run's, which commands select.

    Raises:
        ManifestError: its name is too long.
    """
    name = watcher_name(job)
    if name is None:
        return []
    if len(name) > MAX_CRON_NAME:
        raise ManifestError(
            f"stages.{job.stage.name}.name: the CronJob {name} has {len(name)} characters, and "
            f"Kubernetes allows {MAX_CRON_NAME}; shorten the name of the run or the stage, or set "
            "kubernetes.watch_schedule: null"
        )
    kubernetes = job.config.kubernetes
    labels = {
        **kubernetes.labels,
        "app.kubernetes.io/name": "sm-train",
        "app.kubernetes.io/instance": name,
    }
    container = {
        "name": "watch",
        "image": job.image,
        "command": ["/bin/bash", "-c", watch_command()],
        "env": [
            *(
                {"name": variable, "value": value}
                for variable, value in job.variables([], volumes.checkpoints).items()
            ),
            *secret_variables(job),
        ],
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
        "volumeMounts": [
            *_of_checkpoints(volumes.mounts),
            {"name": WORK_VOLUME, "mountPath": WORK_FOLDER},
        ],
    }
    pod = {
        "serviceAccountName": kubernetes.service_account,
        "restartPolicy": "Never",
        "initContainers": [fetch_code(job)],
        "containers": [container],
        "volumes": [*_of_checkpoints(volumes.volumes), {"name": WORK_VOLUME, "emptyDir": {}}],
        **_of_patch(kubernetes.pod_patch),
    }
    metadata = {"labels": labels, "annotations": dict(job.annotations)}
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "CronJob",
            "metadata": {"name": name, "namespace": kubernetes.namespace, **metadata},
            "spec": {
                "schedule": kubernetes.watch_schedule,
                "concurrencyPolicy": "Forbid",
                "successfulJobsHistoryLimit": 1,
                "failedJobsHistoryLimit": 1,
                "jobTemplate": {
                    "metadata": metadata,
                    "spec": {
                        "backoffLimit": 0,
                        "activeDeadlineSeconds": _SECONDS,
                        "template": {"metadata": metadata, "spec": pod},
                    },
                },
            },
        }
    ]


def _of_patch(patch: dict[str, Any]) -> dict[str, Any]:
    """Return what the user's patch of the run's pods says about image and user, not about GPUs."""
    spec = patch.get("spec") or {}
    return {key: spec[key] for key in ("imagePullSecrets", "securityContext") if key in spec}


def _of_checkpoints(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["name"] == CHECKPOINT_VOLUME]

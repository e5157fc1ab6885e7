"""The CronJob of a manifest that watches the run from outside of its pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.job_interface.job_config import JOB_FILE
from sm_train.estimators.bundle.bundle import unpack
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import Target
from sm_train.toolkit.clusters.staged_manifest import manifest_of

from tests.estimators.manifests.documents import (
    IMAGE,
    TARGETS,
    config,
    environment,
    manifest,
    only,
    pods,
)
from tests.support.run_documents import stage

WEBHOOK = {"SM_TRAIN_SLACK_WEBHOOK": "alerts/slack"}


def run(kubernetes: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    return config(kubernetes={"image": IMAGE, **(kubernetes or {})}, **changes)


USEFUL = {
    "a secret with a webhook": run({"secrets": WEBHOOK}),
    "a secret of AWS": run(alerts={"slack_secret": "slack"}),
    "a budget": run(budget={"usd": 1000}),
}


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "slurm"])
@pytest.mark.parametrize("reason", USEFUL)
def test_run_with_alerts_or_a_budget_is_watched(reason: str, target: Target) -> None:
    found = manifest(USEFUL[reason], target)
    cron = only(found, "CronJob")
    assert cron["metadata"]["name"] == f"{found.name}-watch"
    assert cron["spec"]["schedule"] == "*/2 * * * *"
    pod = cron["spec"]["jobTemplate"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert "sm_train.entrypoints.clusters.watch_once" in container["command"][-1]
    assert "nvidia.com/gpu" not in str(container["resources"])
    [training, *_] = pods(found)
    # It reads the same checkpoints, and the commands for the run's pods do not select it.
    assert (
        environment(pod)["SM_TRAIN_NODE"].partition('"checkpoints"')[2].split(",")[0]
        == (environment(training)["SM_TRAIN_NODE"].partition('"checkpoints"')[2].split(",")[0])
    )
    instance = "app.kubernetes.io/instance"
    assert pod["metadata"]["labels"][instance] != training["metadata"]["labels"][instance]
    for purpose in ("stop", "resume"):
        assert f"cronjob/{found.name}-watch" in found.commands[purpose]


@pytest.mark.parametrize(
    "plain", [run(), run({"watch_schedule": None}, budget={"usd": 1000})], ids=["nothing", "null"]
)
def test_other_runs_have_no_cron_job(plain: RunConfig) -> None:
    found = manifest(plain, "trainjob")
    assert "CronJob" not in {item["kind"] for item in found.objects}
    assert "cronjob" not in found.commands["stop"]


def test_shared_volume_of_checkpoints_is_mounted() -> None:
    volume = {"checkpoints": "volume", "checkpoint_volume": {"claim": "fsx"}}
    cron = only(manifest(run({**volume, "secrets": WEBHOOK}), "trainjob"), "CronJob")
    pod = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert [item["name"] for item in pod["volumes"]] == ["checkpoints", "work"]
    assert [item["mountPath"] for item in pod["containers"][0]["volumeMounts"]] == [
        "/mnt/checkpoints",
        "/opt/ml",
    ]


def test_patch_of_the_pods_gives_the_watcher_the_secrets_of_the_registry() -> None:
    secrets = [{"name": "registry"}]
    patch = {"spec": {"imagePullSecrets": secrets, "priorityClassName": "high"}}
    cron = only(manifest(run({"secrets": WEBHOOK, "pod_patch": patch}), "trainjob"), "CronJob")
    pod = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == secrets
    assert "priorityClassName" not in pod


def test_command_to_watch_names_the_place_of_the_checkpoints() -> None:
    place = "sm-train watch s3://ai-bucket/demo/checkpoints"
    assert manifest(run(), "trainjob").commands["watch"] == place
    assert manifest(run(), "slurm").commands["watch"] == "sm-train watch /fsx/sm-train/demo"
    volume = {"checkpoints": "volume", "checkpoint_volume": {"claim": "fsx"}}
    assert "watch" not in manifest(run(volume), "trainjob").commands


def test_name_that_is_too_long_for_a_cron_job_is_refused() -> None:
    stages = [stage("a-stage-with-a-long-name")]
    name = "a-run-with-a-long-name"
    with pytest.raises(ManifestError, match=r"has 53 characters, and Kubernetes allows 52"):
        manifest(run({"secrets": WEBHOOK}, name=name, stages=stages), "trainjob")
    alone = run({"secrets": WEBHOOK, "watch_schedule": None}, name=name, stages=stages)
    assert manifest(alone, "trainjob")


def test_watcher_knows_the_price_also_if_the_run_file_names_no_region() -> None:
    plain = run(region=None, budget={"usd": 1000})
    _, bundle = manifest_of(plain, Path(), None, "trainjob", "us-east-1", None)
    stages = json.loads(unpack(bundle.archive)[JOB_FILE])
    assert stages["256px"]["expected"]["usd_per_instance_hour"] > 1

"""The SDK sends, for every choice of the run file, exactly the request of the pure function."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import boto3
import pytest
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.images import image_uri
from sm_train.estimators.request.launcher import framework_version
from sm_train.estimators.request.training import TrainingRequest, code_uri, training_requests
from sm_train.estimators.sdk.model_trainer import create_training_job, without_timestamps

from tests.conftest import Aws
from tests.support.run_documents import ECR, PLAN, config, stage
from tests.support.service_model import refusals

P5 = {"instance_type": "ml.p5.48xlarge"}
SENT: dict[str, dict[str, Any]] = {
    "spot in a vpc": {
        "cluster": P5
        | {
            "capacity": "spot",
            "max_wait": "6d",
            "retries": 0,
            "vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
        }
    },
    "warm pool, debugged": {
        "cluster": P5 | {"capacity": "warm-pool", "keep_alive_period": "1h", "remote_debug": True}
    },
    "training plan, checked": {
        "cluster": P5
        | {"capacity": "training-plan", "training_plan": f"{PLAN}own", "infra_check": True}
    },
    "preferences": {
        "cluster": P5 | {"alternatives": ["ml.p4de.24xlarge"], "max_pending": "2h"},
    },
    "preferences of other sizes": {
        "cluster": {"instance_type": "ml.g6e.48xlarge", "alternatives": ["ml.g6e.12xlarge"]}
    },
    "enclosed": {
        "output_kms_key": "alias/own",
        "cluster": {
            "instance_type": "ml.p6e-gb200.36xlarge",
            "image": ECR,
            "network_isolation": True,
            "volume_kms_key": "alias/own",
            "encrypt_traffic": True,
        },
    },
    "isolated smddp": {
        "cluster": {
            "instance_type": "ml.p4de.24xlarge",
            "image": ECR,
            "network_isolation": True,
            "backend": "smddp",
        }
    },
    "every channel": {
        "cluster": P5,
        "stages": [stage("a"), stage("b", optimizer_state="keep")],
        "data": {"uri": "s3://my-bucket/shards/", "validation": "s3://my-bucket/held-out/"},
        "model": {"preset": "sd2", "components": "s3://my-bucket/components/"},
        "channels": {
            "masks": {"uri": "s3://my-bucket/masks/", "sharded": True},
            "words": {"uri": "s3://my-bucket/words/", "mode": "File"},
        },
    },
}
"""Beside these, on-demand by torchrun and by SMDDP goes through the command line itself:
tests/toolkit/submit/test_submit.py."""


def _request(run: RunConfig) -> TrainingRequest:
    bundle = build_bundle(run, framework_version(run))
    [request] = training_requests(
        run,
        run.stages[-1:],
        bundle,
        region="us-east-1",
        image=image_uri(run, "us-east-1"),
        now=datetime(2026, 11, 20),
    )
    return request


@pytest.mark.parametrize("choice", SENT)
def test_the_sdk_sends_what_was_shown(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    aws.make_bucket("my-bucket")
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    run = config(**{"tags": {"team": "imaging"}} | SENT[choice])
    request, bundle = _request(run), build_bundle(run, framework_version(run))
    session = boto3.Session(region_name="us-east-1")
    create_training_job(request, bundle, boto_session=session, bucket="my-bucket")
    [sent] = aws.bodies("CreateTrainingJob")
    assert without_timestamps(sent) == without_timestamps(request)
    assert refusals(sent) == []
    # The address of the code that the job is given holds the bundle.
    bucket, _, key = (code_uri(sent) or "").removeprefix("s3://").partition("/")
    stored = aws.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
    assert stored == bundle.archive
    # Later stages start by the very script that the first one staged.
    [drivers] = [
        one["DataSource"]["S3DataSource"]["S3Uri"]
        for one in sent["InputDataConfig"]
        if one["ChannelName"] == "sm_drivers"
    ] or [None]
    if drivers is not None:
        key = f"{drivers.removeprefix('s3://my-bucket/')}/sm_train.sh"
        script = aws.client("s3").get_object(Bucket="my-bucket", Key=key)["Body"].read().decode()
        assert "entrypoints.launch train.py\n" in script

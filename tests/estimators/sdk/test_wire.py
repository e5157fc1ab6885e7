"""For every option of the run file, the SDK sends exactly the request that was displayed."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.images import image_uri
from sm_train.estimators.request.launch_plan import framework_version, launch_plans
from sm_train.estimators.request.request_patch import additions
from sm_train.estimators.request.training_request import (
    TrainingRequest,
    code_uri,
    training_requests,
)
from sm_train.estimators.sdk.model_trainer import create_training_job, without_timestamps

from tests.conftest import Aws
from tests.support.moto_server import aws_session
from tests.support.run_documents import ECR, PLAN, config, stage
from tests.support.service_model import request_errors

pytestmark = pytest.mark.integration

P5 = {"instance_type": "ml.p5.48xlarge"}
RUNS: dict[str, dict[str, Any]] = {
    "spot-in-vpc": {
        "cluster": P5
        | {
            "capacity": "spot",
            "max_wait": "6d",
            "retries": 0,
            "vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
        }
    },
    "warm-pool-remote-debug": {
        "cluster": P5 | {"capacity": "warm-pool", "keep_alive_period": "1h", "remote_debug": True}
    },
    "training-plan": {"cluster": P5 | {"capacity": "training-plan", "training_plan": f"{PLAN}own"}},
    "alternatives": {
        "cluster": P5 | {"alternatives": ["ml.p4de.24xlarge"], "max_pending": "2h"},
    },
    "training-plan-first": {
        "cluster": P5
        | {
            "capacity": "training-plan",
            "training_plan": f"{PLAN}own",
            "alternatives": ["ml.p4de.24xlarge"],
        }
    },
    "private-registry": {
        "cluster": P5
        | {
            "image": "registry.example.com/own:1",
            "image_credentials": "arn:aws:lambda:us-east-1:210987654321:function:registry",
            "vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
        }
    },
    "file-systems": {
        "cluster": P5
        | {
            "vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
            "package_index": "https://packages.example.com/simple/",
        },
        "data": {
            "uri": "s3://ai-bucket/shards",
            "file_system": {"id": "fs-01234567", "type": "FSxLustre", "directory": "/a/shards"},
        },
        "channels": {
            "words": {"file_system": {"id": "fs-01234567", "type": "EFS", "directory": "/words"}}
        },
    },
    "alternatives-with-other-counts": {
        "cluster": {"instance_type": "ml.g6e.48xlarge", "alternatives": ["ml.g6e.12xlarge"]}
    },
    "isolated-encrypted": {
        "output_kms_key": "alias/own",
        "cluster": {
            "instance_type": "ml.p3.16xlarge",
            "image": ECR,
            "network_isolation": True,
            "volume_kms_key": "alias/own",
            "encrypt_traffic": True,
        },
    },
    "isolated-smddp": {
        "cluster": {
            "instance_type": "ml.p4de.24xlarge",
            "image": ECR,
            "network_isolation": True,
            "backend": "smddp",
        }
    },
    "patched": {
        "cluster": P5
        | {
            "request_patch": {
                "SessionChainingConfig": {"EnableSessionTagChaining": True},
                "InfraCheckConfig": {"EnableInfraCheck": False},
                "ResourceConfig": {"InstancePlacementConfig": {"EnableMultipleJobs": True}},
            }
        }
    },
    "every-channel": {
        "cluster": P5,
        "stages": [stage("a"), stage("b", optimizer_state="keep")],
        "data": {"uri": "s3://ai-bucket/shards", "validation": "s3://ai-bucket/held-out/"},
        "model": {"preset": "sd2", "components": "s3://ai-bucket/components/"},
        "channels": {
            "masks": {"uri": "s3://ai-bucket/masks/", "sharded": True},
            "words": {"uri": "s3://ai-bucket/words/", "mode": "File"},
        },
    },
}
"""On-demand jobs with torchrun and SMDDP are tested through the command line, in
tests/toolkit/submit/test_submit.py."""


def _request(run: RunConfig) -> TrainingRequest:
    bundle = build_bundle(run, framework_version(run))
    [request] = training_requests(
        run,
        launch_plans(run, run.stages[-1:], image_uri(run, "us-east-1")),
        bundle,
        region="us-east-1",
        now=datetime(2026, 11, 20),
    )
    return request


@pytest.mark.parametrize("name", RUNS)
def test_sdk_sends_the_displayed_request(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    aws.make_bucket("ai-bucket")
    for variable, value in aws.environment.items():
        monkeypatch.setenv(variable, value)
    run = config(**{"tags": {"team": "imaging"}} | RUNS[name])
    request, bundle = _request(run), build_bundle(run, framework_version(run))
    session = aws_session()
    create_training_job(
        request, bundle, boto_session=session, bucket="ai-bucket", added=additions(run.cluster)
    )
    [sent] = aws.bodies("CreateTrainingJob")
    assert without_timestamps(sent) == without_timestamps(request)
    assert request_errors(sent) == []
    # The code URI in the request contains the bundle.
    bucket, _, key = (code_uri(sent) or "").removeprefix("s3://").partition("/")
    stored = aws.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
    assert stored == bundle.archive
    # Later stages start with the script that the first one staged.
    [drivers] = [
        channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in sent["InputDataConfig"]
        if channel["ChannelName"] == "sm_drivers"
    ] or [None]
    if drivers is not None:
        key = f"{drivers.removeprefix('s3://ai-bucket/')}sm_train.sh"
        script = aws.client("s3").get_object(Bucket="ai-bucket", Key=key)["Body"].read().decode()
        assert "entrypoints.launcher.launch train.py\n" in script


@pytest.mark.slow
def test_token_of_codeartifact_is_not_left_to_the_sdks_script(
    aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That script gives it to pip as an argument, which its traceback shows."""
    aws.make_bucket("ai-bucket")
    for variable, value in aws.environment.items():
        monkeypatch.setenv(variable, value)
    scripts = {}
    repository = "arn:aws:codeartifact:us-east-1:210987654321:repository/own/packages"
    for index in (None, repository):
        run = config(cluster=P5 | {"package_index": index})
        request, bundle = _request(run), build_bundle(run, framework_version(run))
        create_training_job(
            request,
            bundle,
            boto_session=aws_session(),
            bucket="ai-bucket",
            added=additions(run.cluster),
        )
        sent = aws.bodies("CreateTrainingJob")[-1]
        [uri] = [
            channel["DataSource"]["S3DataSource"]["S3Uri"]
            for channel in sent["InputDataConfig"]
            if channel["ChannelName"] == "sm_drivers"
        ]
        key = f"{uri.removeprefix('s3://ai-bucket/')}sm_train.sh"
        scripts[index] = aws.client("s3").get_object(Bucket="ai-bucket", Key=key)["Body"].read()
    assert b"install_requirements.py requirements.txt" in scripts[None]
    assert b"install_requirements.py" not in scripts[repository]
    launch = b"-m sm_train.entrypoints.base.pip_install && exec $SM_PYTHON_CMD -m"
    assert launch in scripts[repository]

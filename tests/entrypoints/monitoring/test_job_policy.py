"""A running job asks AWS for no more than the policy of its role allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sm_train.entrypoints.job_interface.index_location import removal_list_uri
from sm_train.entrypoints.monitoring.alert_sinks import SnsSink, secret
from sm_train.entrypoints.monitoring.alerts import Alert
from sm_train.entrypoints.monitoring.secret_values import read_key
from sm_train.entrypoints.shards import removed_samples
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.removed_samples import RemovedSamples, channel_removals

from tests.conftest import Aws, Cli
from tests.support.aws.policy_enforcement import ACCOUNT
from tests.support.run_files import write_run

STALL = Alert("stall", "error", "no progress", "demo", "256px", "no heartbeat for 180 s", 1.8e9)


@pytest.mark.integration
def test_a_running_job_needs_only_the_printed_policy(
    cli: Cli, aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its secrets, its alerts and the list of removed samples; SageMaker copies everything else."""
    listed = RemovalList().with_samples(
        [{"shard": "1.tar", "key": "7", "source": None, "removed": "2026-11-28T00:00:00+00:00"}]
    )
    aws.make_bucket("their-bucket", **{"index.parquet.removed": listed.encode()})
    topic = aws.client("sns").create_topic(Name="team")["TopicArn"]
    aws.client("secretsmanager").create_secret(Name="team/slack", SecretString="https://slack/1")
    aws.client("ssm").put_parameter(Name="/team/key", Value="key", Type="SecureString")
    run = write_run(
        tmp_path,
        role=f"arn:aws:iam::{ACCOUNT}:role/sm-train",
        data={"uri": "s3://their-bucket/shards/"},
        alerts={
            "sns_topic": topic,
            "slack_secret": "team/slack",
            "webhook_secret": "ssm:/team/key",
        },
    )
    printed = cli("iam", run, "--json")
    assert printed.returncode == 0, printed.stderr
    for name, value in (aws.environment | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    removed_samples._open_store.cache_clear()
    aws.policy = json.loads(printed.stdout)["job"]
    assert secret("team/slack") == "https://slack/1"
    assert read_key("ssm:/team/key") == "key"
    SnsSink(topic).send(STALL)
    address = removal_list_uri("s3://their-bucket/shards/")
    removed = RemovedSamples(channel_removals("train", ["1.tar"], None, address))
    [notice] = removed.enter(0)
    removed_samples._open_store.cache_clear()
    assert (notice.samples, notice.problem) == (1, None)
    assert aws.denied == []
    actions = {permission.action for permission in aws.checked}
    assert actions >= {
        "s3:GetObject",
        "sns:Publish",
        "secretsmanager:GetSecretValue",
        "ssm:GetParameter",
    }

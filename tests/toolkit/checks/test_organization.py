"""Defaults of SageMaker's SDK that an organization has for its training jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.toolkit.checks.organization import organization_findings

from tests.conftest import Cli
from tests.support.run_documents import config

VPC = {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}
DEFAULTS = {
    "VpcConfig": VPC,
    "OutputDataConfig": {"KmsKeyId": "key-1"},
    "ResourceConfig": {"VolumeKmsKeyId": "key-2"},
    "EnableNetworkIsolation": True,
    "EnableInterContainerTrafficEncryption": True,
    "Tags": [{"Key": "cost-center", "Value": "7"}],
}
KEYS = [
    *("cluster.vpc", "output_kms_key", "cluster.volume_kms_key", "cluster.network_isolation"),
    *("cluster.encrypt_traffic", "tags.cost-center"),
]


def write(path: Path, training_job: Any) -> Path:
    document = {"SchemaVersion": "1.0", "SageMaker": {"TrainingJob": training_job}}
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write(tmp_path / "admin.yaml", DEFAULTS)
    monkeypatch.setenv("SAGEMAKER_ADMIN_CONFIG_OVERRIDE", str(path))
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(tmp_path / "none.yaml"))
    return path


def where(run: Any) -> list[str]:
    return [finding.where for finding in organization_findings(run)]


@pytest.mark.usefixtures("defaults")
def test_each_default_that_the_run_file_lacks_is_named() -> None:
    assert where(config()) == KEYS


@pytest.mark.usefixtures("defaults")
def test_what_the_run_file_states_is_not_named() -> None:
    cluster = {
        "vpc": {"subnets": ["subnet-2"], "security_groups": ["sg-2"]},
        "encrypt_traffic": True,
        "volume_kms_key": "alias/own",
        "instance_type": "ml.p3.16xlarge",
    }
    stated = config(cluster=cluster, tags={"cost-center": "8"}, output_kms_key="alias/own")
    assert where(stated) == ["cluster.network_isolation"]


@pytest.mark.parametrize("content", ["", "SageMaker: {}", "SageMaker: {TrainingJob: }"])
def test_a_file_that_says_nothing_is_no_finding(defaults: Path, content: str) -> None:
    defaults.write_text(content)
    assert where(config()) == []


@pytest.mark.parametrize(
    "content",
    [
        *("[1]", "SageMaker: 3", "a: [", "SageMaker: {TrainingJob: {Tags: 5}}"),
        *(f"SageMaker: {{TrainingJob: {{{name}: 5}}}}" for name in ("VpcConfig", "ResourceConfig")),
        "SageMaker: {TrainingJob: {Tags: [a]}}",
    ],
)
def test_a_damaged_file_is_one_finding_about_it(defaults: Path, content: str) -> None:
    defaults.write_text(content)
    [finding] = organization_findings(config())
    assert finding.message.startswith(f"{defaults}: not compared with the run: ")


def test_init_names_them_when_it_writes_the_run_file(
    cli: Cli, tmp_path: Path, defaults: Path
) -> None:
    environment = {"SAGEMAKER_ADMIN_CONFIG_OVERRIDE": str(defaults)}
    made = cli("init", tmp_path / "run.yaml", "--no-input", env=environment)
    assert made.returncode == 0, made.stderr
    assert "sets VpcConfig" in made.stderr
    checked = cli("check", tmp_path / "run.yaml", "--offline", env=environment)
    assert "organization-defaults" in checked.stdout + checked.stderr

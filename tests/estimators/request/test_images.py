"""Images come from the SDK's table without network access, or from the run file."""

from __future__ import annotations

from typing import Any

import pytest
from sm_train.estimators.bundle.bundle import requirements
from sm_train.estimators.request.images import dockerfile, image_uri

from tests.support.run_documents import ECR, config

P5 = {"instance_type": "ml.p5.48xlarge"}
SMDDP = {"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}


@pytest.mark.parametrize(
    ("cluster", "region", "image"),
    [
        (
            {"backend": "smddp"},
            "us-east-1",
            "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.5.1-gpu",
        ),
        ({}, "us-east-1", "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn"),
        (P5, "eu-south-1", "692866216735.dkr.ecr.eu-south-1.amazonaws.com/pytorch:2.13-cu133"),
        (P5, "cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:2.13-cu133"),
        (P5 | {"framework_version": "2.7.1"}, "us-west-2", "pytorch-training:2.7.1-gpu-py312"),
        (
            P5 | {"framework_version": "2.12.0"},
            "us-west-2",
            "pytorch:2.12-cu130-amzn2023-sagemaker",
        ),
        (P5 | {"image": ECR}, "us-east-1", ECR),
        (P5 | {"image": f"{ECR.partition(':')[0]}@sha256:{'0' * 64}"}, "us-east-1", "@sha256:0000"),
    ],
)
def test_image_of_a_run(cluster: dict[str, Any], region: str, image: str) -> None:
    run = config(cluster={"instance_type": "ml.p4de.24xlarge"} | cluster)
    assert image in image_uri(run, region)


@pytest.mark.parametrize(
    ("cluster", "region", "message"),
    [
        ({"framework_version": "9.9.0"}, "us-east-1", "cluster.framework_version or region: .*9.9"),
        ({}, "moon-west-1", "cluster.framework_version or region: .*moon-west-1"),
        (
            {"image": "python:3.12"},
            "us-east-1",
            "python:3.12 is not in Amazon ECR; .*or set cluster.vpc",
        ),
        ({"instance_type": "ml.trn1.32xlarge"}, "us-east-1", "Trainium1.*choose another GPU type"),
        (
            {"instance_type": "ml.trn1.32xlarge", "image": ECR},
            "us-east-1",
            "Trainium1.*choose another GPU type",
        ),
        (
            {"instance_type": "ml.p6e-gb200.36xlarge", "image": ECR},
            "us-east-1",
            "p6e-gb200.36xlarge has Arm processors.*UltraServers need a placement",
        ),
        ({"instance_type": "ml.p5.48xlarge", "framework_version": "2.12"}, "moon-west-1", "moon"),
    ],
)
def test_unusable_image_is_an_error(cluster: dict[str, Any], region: str, message: str) -> None:
    run = config(cluster={"instance_type": "ml.p5.48xlarge"} | cluster)
    with pytest.raises(ValueError, match=message):
        image_uri(run, region)


@pytest.mark.parametrize(
    ("cluster", "base", "version"),
    [
        (SMDDP, "pytorch-training:2.5.1-gpu-py311", "2.5.1"),
        (SMDDP | {"framework_version": "2.3.0"}, "pytorch-training:2.3.0-gpu-py311", "2.3.0"),
        (P5, "pytorch:2.13-cu133-amzn2023-sagemaker", "2.13.0"),
        (P5 | {"image": ECR, "network_isolation": True}, "pytorch:2.13-cu133-amzn2023", "2.13.0"),
        (SMDDP | {"image": ECR}, "pytorch-training:2.5.1-gpu", "2.5.1"),
    ],
)
def test_dockerfile_installs_all_packages(cluster: dict[str, Any], base: str, version: str) -> None:
    text = dockerfile(config(cluster=cluster), "us-east-1", ("einops==0.8.1",))
    assert "\nPACKAGES\nRUN pip install --no-cache-dir -r /tmp/requirements-user.txt" in text
    assert "\neinops==0.8.1\n" in text
    [base_line] = [line for line in text.splitlines() if line.startswith("FROM ")]
    assert base in base_line
    for line in requirements(version).splitlines():
        assert line.lstrip().startswith("#") or f"\n{line}\n" in text
    assert "@" not in text

"""Images that are found without the SDK are those that the SDK finds."""

from __future__ import annotations

import random

import pytest
from sm_train.estimators.request.image_table import training_image

GPU, CPU = "ml.p4d.24xlarge", "ml.m5.xlarge"


def test_images_of_the_table_are_the_sdks() -> None:
    """A sample: the SDK takes a moment for each."""
    from sagemaker.core import image_uris

    table = image_uris.config_for_framework("pytorch")["training"]
    aliases = table["version_aliases"]
    all_ = [
        (version, region)
        for version in (*table["versions"], *aliases)
        for region in table["versions"][aliases.get(version, version)]["registries"]
    ]
    asked = random.Random(0).sample(all_, 40)
    for version, region in asked:
        for machine in (GPU, CPU):
            found = training_image("pytorch", version, region, machine)
            if found is not None:
                assert found == image_uris.retrieve(
                    "pytorch",
                    region=region,
                    version=version,
                    instance_type=machine,
                    image_scope="training",
                )


@pytest.mark.parametrize("version", ["2.3.0", "2.3", "2.8.0"])
@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1", "ap-northeast-1", "cn-north-1"])
def test_usual_ones_are_found(version: str, region: str) -> None:
    assert training_image("pytorch", version, region, GPU)


@pytest.mark.parametrize(
    ("framework", "version", "region", "machine"),
    [
        ("pytorch", "9.9", "us-east-1", GPU),
        ("pytorch", "2.3.0", "moon-1", GPU),
        ("pytorch", "2.3.0", "us-iso-east-1", GPU),
        ("pytorch", "2.3.0", "us-east-1", "ml.trn1.32xlarge"),
        ("pytorch-amzn2023", "2.14", "us-east-1", GPU),
        ("no-such-framework", "1", "us-east-1", GPU),
    ],
)
def test_what_is_not_plain_is_left_to_the_sdk(
    framework: str, version: str, region: str, machine: str
) -> None:
    assert training_image(framework, version, region, machine) is None

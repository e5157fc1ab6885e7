"""The table lookup returns the same images as the SDK."""

from __future__ import annotations

import random

import pytest
from sm_train.estimators.request.image_table import training_image

GPU, CPU = "ml.p4d.24xlarge", "ml.m5.xlarge"


@pytest.mark.parametrize("framework", ["pytorch", "pytorch-amzn2023"])
def test_table_lookup_equals_the_sdk(framework: str) -> None:
    """On a random sample: the SDK is slow."""
    from sagemaker.core import image_uris

    table = image_uris.config_for_framework(framework)["training"]
    aliases = table["version_aliases"]
    candidates = [
        (version, region)
        for version in (*table["versions"], *aliases)
        for region in table["versions"][aliases.get(version, version)]["registries"]
    ]
    for version, region in random.Random(0).sample(candidates, 20):
        for instance in (GPU, CPU):
            image = training_image(framework, version, region, instance)
            if image is not None:
                assert image == image_uris.retrieve(
                    framework,
                    region=region,
                    version=version,
                    instance_type=instance,
                    image_scope="training",
                )


@pytest.mark.parametrize("version", ["2.3.0", "2.3", "2.8.0"])
@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1", "ap-northeast-1", "cn-north-1"])
def test_common_images_are_in_the_table(version: str, region: str) -> None:
    assert training_image("pytorch", version, region, GPU)
    assert training_image("pytorch-amzn2023", "2.13", region, GPU)


@pytest.mark.parametrize(
    ("framework", "version", "region", "instance"),
    [
        ("pytorch", "9.9", "us-east-1", GPU),
        ("pytorch", "2.3.0", "moon-1", GPU),
        ("pytorch", "2.3.0", "us-iso-east-1", GPU),
        ("pytorch", "2.3.0", "us-east-1", "ml.trn1.32xlarge"),
        ("no-such-framework", "1", "us-east-1", GPU),
    ],
)
def test_ambiguous_entries_are_left_to_the_sdk(
    framework: str, version: str, region: str, instance: str
) -> None:
    assert training_image(framework, version, region, instance) is None

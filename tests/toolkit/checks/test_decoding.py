"""`check` compares the images that an instance's CPUs decode with those that its GPUs train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sm_train.entrypoints.shards.shard_index import IndexHeader
from sm_train.toolkit.checks.decoding import decoding_findings
from sm_train.toolkit.checks.shards import Shards
from sm_train.toolkit.run_file.run_file import load

RUN = """
name: decoding
model: {preset: sd2}
data: {uri: s3://data/set/, icc_profile: POLICY}
cluster: {instance_type: ml.p4de.24xlarge}
training: {decode_workers: WORKERS}
stages:
  - name: 512px
    resolution: 512
    instances: 4
    per_device_batch_size: 64
    max_steps: 10
    learning_rate: 1.0e-4
"""
SAMPLES = 1_000_000
MEGAPIXEL = 400_000
"""Bytes of a sample whose image has about a million pixels."""


def findings(
    folder: Path, colors: dict[str, int], steps_per_second: float, **changes: Any
) -> list[tuple[str, str, str]]:
    """Return level, message and fix for four instances of 8 GPUs, 64 images on each."""
    text = RUN.replace("POLICY", changes.get("policy", "srgb"))
    path = folder / "run.yaml"
    path.write_text(text.replace("WORKERS", str(changes.get("workers", 8))))
    header = IndexHeader(1, SAMPLES, SAMPLES * MEGAPIXEL, colors=colors)
    latents = changes.get("latents", 0)
    shards = Shards("data.uri", "s3://data/set", np.array([1]), latents=latents, header=header)
    stage = {
        "name": "512px",
        "resolution": 512,
        "instance_type": changes.get("instance_type", "ml.p4de.24xlarge"),
        "instances": 4,
        "world_size": 32,
        "effective_batch_size": 2048,
        "steps_per_second": steps_per_second,
    }
    found = decoding_findings(shards, {"stages": [stage]}, load(path))
    return [(finding.level, finding.message, finding.fix) for finding in found]


def test_decoding_is_compared_with_training(tmp_path: Path) -> None:
    # 4.7 ms for the stored pixels and 2.3 ms for the crop; 64 decoders.
    [(level, message, _)] = findings(tmp_path, {"none/RGB/8": SAMPLES}, 1.8)
    assert level == "info"
    assert message == (
        "512px trains on 922 images/s on each ml.p4de.24xlarge, whose 64 decoders on 96 vCPUs "
        "decode about 9,134 (7.0 ms an image)"
    )


@pytest.mark.parametrize(
    ("colors", "policy", "milliseconds"),
    [
        ({"Adobe RGB/RGB/8": SAMPLES}, "srgb", "11.4"),
        ({"Adobe RGB/RGB/8": SAMPLES}, "ignore", "7.0"),
        ({"CMYK/CMYK/8": SAMPLES // 2, "none/RGB/8": SAMPLES // 2}, "srgb", "9.8"),
        ({}, "srgb", "7.0"),
    ],
)
def test_profiles_are_priced(
    tmp_path: Path, colors: dict[str, int], policy: str, milliseconds: str
) -> None:
    [(_, message, _)] = findings(tmp_path, colors, 1.8, policy=policy)
    assert f"({milliseconds} ms an image)" in message


def test_a_shortage_is_a_warning_with_the_number_of_decoders(tmp_path: Path) -> None:
    [(level, message, fix)] = findings(tmp_path, {"none/RGB/8": SAMPLES}, 3.6, workers=1)
    assert level == "warning"
    assert "8 decoders on 96 vCPUs decode about 1,142" in message
    assert fix == "set training.decode_workers to 2"
    [(level, _, fix)] = findings(tmp_path, {"none/RGB/8": SAMPLES}, 60.0)
    assert (level, fix.partition(",")[0]) == ("warning", "pack the images with --max-side 1024")


@pytest.mark.parametrize(
    "changes", [{"latents": 512}, {"instance_type": "own.8xH100.3200gbps.20usd"}]
)
def test_nothing_is_said_without_decoding_or_knowledge(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert findings(tmp_path, {"none/RGB/8": SAMPLES}, 1.8, **changes) == []

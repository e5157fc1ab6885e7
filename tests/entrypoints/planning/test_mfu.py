"""MFU: by the model's own FLOP and the device's peak, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sm_train.entrypoints.common.job_config import JobConfig, read_job_config
from sm_train.entrypoints.planning.mfu import of_device, utilization

from tests.support.cluster.training_jobs import tiny_run
from tests.support.run_documents import write_job_file


@pytest.fixture
def sd2(tmp_path: Path) -> JobConfig:
    path = write_job_file(tmp_path, tiny_run(max_steps=1, precision="bf16"))
    settings = read_job_config(path, "8px")
    stage = replace(settings.stage, resolution=512)
    return replace(settings, model=replace(settings.model, preset="sd2"), stage=stage)


@pytest.mark.parametrize(
    ("device", "share"),
    [("NVIDIA H100 80GB HBM3", 100 * 2.413 / 989), ("NVIDIA A100-SXM4-80GB", 100 * 2.413 / 312)],
)
def test_it_is_the_models_flop_over_the_peak(sd2: JobConfig, device: str, share: float) -> None:
    """A hundred images a second and GPU at 512 px, of 2.413 TFLOP each."""
    found = of_device(sd2, device)
    assert found is not None
    assert found.share(images_per_second=800, gpus=8) == pytest.approx(share, rel=0.01)


def test_what_is_not_known_is_not_guessed(sd2: JobConfig) -> None:
    assert of_device(sd2, "NVIDIA T4") is None
    assert utilization(sd2, torch.device("cpu")) is None
    in_fp32 = replace(sd2, training=replace(sd2.training, precision="fp32"))
    assert of_device(in_fp32, "NVIDIA H100 80GB HBM3") is None

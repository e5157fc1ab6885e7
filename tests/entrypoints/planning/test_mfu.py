"""MFU from the model's FLOPs and the device's peak, where both are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sm_train.entrypoints.job_interface.job_config import JobConfig, read_job_config
from sm_train.entrypoints.planning.mfu import mfu_meter, mfu_meter_of

from tests.support.cluster.training_jobs import tiny_run
from tests.support.run_documents import write_job_file


@pytest.fixture
def sd2(tmp_path: Path) -> JobConfig:
    path = write_job_file(tmp_path, tiny_run(max_steps=1, precision="bf16"))
    settings = read_job_config(path, "8px")
    stage = replace(settings.stage, resolution=512)
    return replace(settings, model=replace(settings.model, preset="sd2"), stage=stage)


@pytest.mark.parametrize(
    ("device", "mfu"),
    [("NVIDIA H100 80GB HBM3", 100 * 2.413 / 989), ("NVIDIA A100-SXM4-80GB", 100 * 2.413 / 312)],
)
def test_mfu_is_model_flops_over_peak(sd2: JobConfig, device: str, mfu: float) -> None:
    """100 images/s per GPU at 512 px, 2.413 TFLOP each."""
    meter = mfu_meter_of(sd2, device)
    assert meter is not None
    assert meter.mfu(images_per_second=800, gpus=8) == pytest.approx(mfu, rel=0.01)


def test_no_mfu_for_unknown_peak(sd2: JobConfig) -> None:
    assert mfu_meter_of(sd2, "NVIDIA T4") is None
    assert mfu_meter(sd2, torch.device("cpu")) is None
    fp32 = replace(sd2, training=replace(sd2.training, precision="fp32"))
    assert mfu_meter_of(fp32, "NVIDIA H100 80GB HBM3") is None

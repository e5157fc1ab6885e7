"""The run document: one stage is read from it, and errors name what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sm_train.entrypoints.common.job_config import JobConfigError, read_job_config

from tests.support.run_documents import config


def test_run_document_is_read_by_stage(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    document = config().model_dump(mode="json")
    path.write_text(json.dumps(document))
    job_config = read_job_config(path, "256px")
    assert job_config.stage.gradient_accumulation_steps == 2
    assert job_config.training.warmup_steps == 1000
    with pytest.raises(JobConfigError, match=r"--stage: 'x' .*it has 256px"):
        read_job_config(path, "x")
    del document["training"]["seed"]
    path.write_text(json.dumps(document))
    with pytest.raises(JobConfigError, match="seed is missing"):
        read_job_config(path, "256px")
    with pytest.raises(JobConfigError, match="no run document"):
        read_job_config(tmp_path / "none.json", "256px")

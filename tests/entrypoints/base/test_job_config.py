"""The job configuration is read by stage, and errors name what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.job_interface.job_config import JobConfigError, read_job_config
from sm_train.estimators.bundle.job_configs import job_configs

from tests.support.run_documents import config, job_document, write_job_file


def test_job_config_is_read_by_stage(tmp_path: Path) -> None:
    path = write_job_file(tmp_path, config())
    job_config = read_job_config(path, "256px")
    assert job_config.stage.gradient_accumulation_steps == 2
    assert job_config.training.warmup_steps == 1000
    with pytest.raises(JobConfigError, match=r"--stage: 'x' .*it has 256px"):
        read_job_config(path, "x")


def test_missing_field_or_file_is_named(tmp_path: Path) -> None:
    document = job_document(config())
    del document["256px"]["training"]["seed"]
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document))
    with pytest.raises(JobConfigError, match="seed is missing"):
        read_job_config(path, "256px")
    with pytest.raises(JobConfigError, match="no job configuration"):
        read_job_config(tmp_path / "none.json", "256px")


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    """An earlier bundle's code can read a configuration that a newer version wrote."""
    document = job_document(config())
    document["256px"]["training"]["new_key"] = document["256px"]["new_section"] = 1
    path = write_job_file(tmp_path, config())
    expected = read_job_config(path, "256px")
    path.write_text(json.dumps(document))
    assert read_job_config(path, "256px") == expected


@pytest.mark.parametrize("lora", [None, {"rank": 4, "targets": ["to_q"]}])
def test_optional_sections_are_read_as_they_were_written(
    tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    settings = config(model={"preset": "sd2", "lora": lora}, trackers=["tensorboard"])
    [expected] = job_configs(settings).values()
    assert read_job_config(write_job_file(tmp_path, settings), "256px") == expected

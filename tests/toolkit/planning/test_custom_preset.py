"""A custom preset is planned and priced like a shipped one of the same sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.models.components import PRESETS
from sm_train.entrypoints.planning.memory import plan_model
from sm_train.estimators.bundle.bundle import unpack
from sm_train.toolkit.submit.run_bundle import bundle_of

from tests.conftest import Cli
from tests.support.run_documents import run, stage

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def write_run(folder: Path, name: str, preset: str, **changes: Any) -> Path:
    stages = [stage(resolution=32, per_device_batch_size=8, steps_per_second=None)]
    document = run(model={"preset": preset}, stages=stages, **changes)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.slow
def test_same_sizes_have_the_same_plan_cost_and_findings(cli: Cli, folder: Path) -> None:
    (folder / "mine.json").write_bytes((PRESETS / "tiny-mmdit.json").read_bytes())
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    outputs = []
    for name, preset in (("shipped", "tiny-mmdit"), ("custom", "mine.json")):
        path = write_run(folder, name, preset)
        cost = cli("cost", path, "--json", env=env)
        assert cost.returncode == 0, cost.stderr
        check = cli("check", path, "--offline", "--json", env=env)
        outputs.append((json.loads(cost.stdout)["stages"], json.loads(check.stdout)["findings"]))
    assert outputs[0] == outputs[1]

    from sm_train.estimators.config.load import load_run

    config = load_run(folder / "custom.yaml")
    files = unpack(bundle_of(config, folder).archive)
    (folder / "job.json").write_bytes(files["job.json"])
    job = read_job_config(folder / "job.json", "256px")
    assert job.expected.model_plan is not None
    in_job = plan_model(job.model, 32, precision="bf16", plan=job.expected.model_plan)
    assert in_job == plan_model(
        load_run(folder / "shipped.yaml").model.job_config(), 32, precision="bf16"
    )


@pytest.mark.slow
def test_sizes_that_do_not_fit_together_are_an_error_of_check(cli: Cli, folder: Path) -> None:
    preset = json.loads((PRESETS / "tiny-mmdit.json").read_text())
    preset["network"]["caption_projection_dim"] = 48
    (folder / "mine.json").write_text(json.dumps(preset))
    path = write_run(folder, "custom", "mine.json")
    result = cli("check", path, "--offline", env={"XDG_CACHE_HOME": str(folder / "cache")})
    assert result.returncode == 3, result.stdout
    assert "memory-unplanned" in result.stdout + result.stderr
    assert "mine.json: the model cannot be built" in result.stdout + result.stderr


@pytest.mark.slow
def test_network_that_takes_no_single_image_is_a_warning_of_check(cli: Cli, folder: Path) -> None:
    """One channel per group on a map of one pixel: the network trains on batches of two."""
    preset = json.loads((PRESETS / "tiny-sd2.json").read_text())
    preset["network"] |= {"block_out_channels": [16, 16], "norm_num_groups": 16}
    (folder / "mine.json").write_text(json.dumps(preset))
    path = write_run(folder, "custom", "mine.json")
    result = cli(
        "check", path, "--offline", "--json", env={"XDG_CACHE_HOME": str(folder / "cache")}
    )
    findings = json.loads(result.stdout)["findings"]
    [unplanned] = [finding for finding in findings if finding["code"] == "memory-unplanned"]
    assert unplanned["level"] == "warning"
    assert "mine.json: its FLOPs and memory cannot be measured" in unplanned["message"]
    assert "the network takes no single image" in unplanned["message"]

"""Models without a plan: measured where PyTorch is installed, reported otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run_files import write_run

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def with_custom_preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with a custom preset, ``custom``."""
    folder = tmp_path_factory.mktemp("installed")
    for name in ("cost", "entrypoints", "estimators", "toolkit"):
        shutil.copytree(
            ROOT / name,
            folder / "sm_train" / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    presets = folder / "sm_train" / "entrypoints" / "models" / "presets"
    preset = json.loads((presets / "tiny-dit.json").read_text())
    preset["network"]["num_layers"] = 3
    (presets / "custom.json").write_text(json.dumps(preset))
    return folder


def sm_train(folder: Path, *arguments: str | Path, torch: bool) -> subprocess.CompletedProcess[str]:
    """Run the copied package's command, with PyTorch hidden unless ``torch``."""
    hide = (
        ""
        if torch
        else (
            "import importlib.util as util\n"
            "find = util.find_spec\n"
            "util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        )
    )
    start = "import sys\nfrom sm_train.toolkit.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", hide + start, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_preset_without_a_plan_is_reported_and_measured_with_pytorch(
    with_custom_preset: Path, tmp_path: Path
) -> None:
    run = write_run(tmp_path, model={"preset": "custom"})
    command = "run python -m sm_train.entrypoints.planning.measure custom"
    checked = sm_train(with_custom_preset, "check", run, "--offline", "--json", torch=False)
    [unplanned] = [
        finding
        for finding in json.loads(checked.stdout)["findings"]
        if finding["code"] == "memory-unplanned"
    ]
    assert (unplanned["level"], unplanned["where"]) == ("warning", "model.preset")
    assert unplanned["message"] == "preset custom: not planned"
    assert unplanned["fix"] == command
    priced = sm_train(with_custom_preset, "cost", run, "--json", torch=False)
    assert f"preset custom: not planned; {command}" in json.loads(priced.stdout)["warnings"]
    plan = with_custom_preset / "sm_train" / "entrypoints" / "planning" / "plans" / "custom.json"
    assert not plan.exists()

    checked = sm_train(with_custom_preset, "check", run, "--offline", "--json", torch=True)
    assert "memory-unplanned" not in checked.stdout
    assert json.loads(plan.read_text())["fsdp_block_parameters"] == [16992] * 3
    priced = sm_train(with_custom_preset, "cost", run, "--json", torch=False)
    assert "not planned" not in priced.stdout

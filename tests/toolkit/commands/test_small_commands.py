"""``init``, ``schema``, ``completion``, ``image`` and ``--help``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml
from sm_train.cost.instances import instance_type
from sm_train.estimators.config.load import load_run

from tests.conftest import Cli
from tests.support.run_files import write_run

PRESETS = ["default", "bria-2.0", "infiniband-20b", "demo"]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_valid_commented_run_file(cli: Cli, tmp_path: Path, preset: str) -> None:
    assert cli("init", "new.yaml", "--preset", preset).returncode == 0
    path = tmp_path / "new.yaml"
    load_run(path)
    assert path.read_text().count("#") > 5
    schema = json.loads(cli("schema").stdout)
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)


def test_published_stages_have_their_effective_batch_size(cli: Cli, tmp_path: Path) -> None:
    cli("init", "bria.yaml", "--preset", "bria-2.0")
    run = load_run(tmp_path / "bria.yaml")
    gpus = instance_type(run.cluster.instance_type).accelerators
    assert [
        (stage.resolution, stage.instances, stage.instances * gpus) for stage in run.stages
    ] == [(256, 4, 32), (512, 8, 64), (1024, 16, 128)]
    for stage in run.stages:
        assert (
            stage.per_device_batch_size * stage.gradient_accumulation_steps * stage.instances * gpus
            == 2048
        )
    text = (tmp_path / "bria.yaml").read_text()
    assert "batch 8, accumulate 2" in text
    assert "512, not 2048" in text


def test_init_does_not_overwrite_an_existing_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine")
    result = cli("init")
    assert result.returncode == 2
    assert "--force" in result.stderr
    assert path.read_text() == "mine"
    assert cli("init", "--force").returncode == 0
    assert load_run(path)


def test_init_fails_if_the_folder_is_missing(cli: Cli) -> None:
    result = cli("init", "missing/run.yaml")
    assert result.returncode == 2
    assert "missing" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(cli: Cli, shell: str) -> None:
    result = cli("completion", shell)
    assert result.returncode == 0
    assert "_SM_TRAIN_COMPLETE" in result.stdout


def test_bash_completes_a_command(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from sm_train.toolkit.cli import main; main([])"],
        env={
            **os.environ,
            "_SM_TRAIN_COMPLETE": "bash_complete",
            "COMP_WORDS": "sm-train sub",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "submit" in result.stdout


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom sm_train.toolkit.cli import main\n"
        "try:\n    main(['--help'])\nfinally:\n"
        "    print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0
    for name in ("init", "pack", "cost", "submit", "image", "iam", "sample", "schema"):
        assert f"  {name}" in result.stdout
    loaded = set(result.stderr.split())
    assert not loaded & {
        "torch",
        "boto3",
        "botocore",
        "sagemaker",
        "webdataset",
        "pydantic",
        "rich",
        "yaml",
    }


def test_unknown_command_suggests_the_nearest(cli: Cli) -> None:
    result = cli("submitt")
    assert result.returncode == 2
    assert "submit" in result.stderr


def test_image_prints_the_uri_or_a_dockerfile(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path, cluster={"instance_type": "ml.p5.48xlarge"})
    result = cli("image", run)
    assert result.returncode == 0, result.stderr
    uri = result.stdout.strip()
    assert uri.startswith("763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-")
    assert json.loads(cli("image", run, "--json").stdout) == {"image": uri, "region": "us-east-1"}
    assert f"\nFROM {uri}\n" in cli("image", run, "--dockerfile").stdout


def test_base_images_have_digests_and_packages_have_hashes() -> None:
    dockerfiles = sorted(Path(str(files("sm_train.toolkit") / "templates")).glob("*.Dockerfile"))
    assert len(dockerfiles) == 3
    for dockerfile in dockerfiles:
        lines = dockerfile.read_text().splitlines()
        [base] = [line for line in lines if line.startswith("ARG BASE=")]
        assert re.fullmatch(r"ARG BASE=\S+:\S+@sha256:[0-9a-f]{64}", base)
        assert [line for line in lines if line.startswith("FROM ")] == ["FROM ${BASE}"]
        installs = [line for line in lines if re.search("pip3? install", line)]
        assert installs
        assert all("--require-hashes -r /tmp/requirements" in line for line in installs)

"""A machine that AWS does not sell, written as its figures in the run file."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type
from sm_train.cost.prices import shipped_prices

from tests.conftest import Cli
from tests.support.run_documents import stage
from tests.support.run_files import write_run

OWN = "own.8xH100-SXM5-80GB.3200gbps.23.5usd"
IMAGE = "cr.example.org/imaging/train:1"


def run_file(tmp_path: Path) -> Path:
    return write_run(
        tmp_path,
        cluster={"instance_type": OWN},
        kubernetes={"image": "cr.imaging.org/train:1"},
        slurm={"shared_folder": "/shared", "image": "/shared/train.sqsh"},
        stages=[stage(max_steps=3600, steps_per_second=1.0)],
        data={"uri": "s3://ai-bucket/shards/", "samples": 10**7},
    )


def test_figures_of_an_own_machine_are_those_of_its_name() -> None:
    own, sold = instance_type(OWN), instance_type("ml.p5.48xlarge")
    assert (own.accelerators, own.network_gbps) == (8, 3200)
    for field in ("accelerator", "accelerator_memory_gib", "bf16_tflops", "nvlink_gbytes"):
        assert getattr(own, field) == getattr(sold, field)
    assert not own.supports_efa
    price = shipped_prices().price(OWN, "us-east-1")
    assert price.usd_per_instance_hour == Decimal("23.5")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own.8xH100-SXM5-80GB", "is not a machine such as own.8xH100-SXM5-80GB.3200gbps.23.5usd"),
        ("own.8xH900.100gbps.2usd", "H900 is not a known GPU; write one of A100"),
        ("own.0xH100-SXM5-80GB.100gbps.2usd", "is not a machine such as"),
        ("own.1xTrainium1-32GB.100gbps.2usd", "is not a known GPU"),
    ],
)
def test_mistakes_in_its_figures_are_named(name: str, problem: str) -> None:
    with pytest.raises(UnknownInstanceTypeError, match=problem):
        instance_type(name)


def test_own_machine_is_priced_checked_and_started_by_a_manifest(cli: Cli, tmp_path: Path) -> None:
    run = run_file(tmp_path)
    cost = cli("cost", run, "--json")
    assert cost.returncode == 0, cost.stderr
    [priced] = json.loads(cost.stdout)["stages"]
    assert priced["price_per_instance_hour_usd"] == 23.5
    checked = cli("check", run, "--offline", "--json")
    codes = {finding["code"] for finding in json.loads(checked.stdout)["findings"]}
    assert codes & {"role-unset", "image-unavailable", "instance-quota", "disk-short"} == set()
    for target in ("trainjob", "pytorchjob"):
        written = cli("manifest", run, "--to", target)
        assert written.returncode == 0, written.stderr
        text = "".join(
            json.dumps(document) for document in yaml.safe_load_all(written.stdout) if document
        )
        assert "node.kubernetes.io/instance-type" not in text
        assert '"nvidia.com/gpu": "8"' in text
    script = cli("manifest", run, "--to", "slurm")
    assert "#SBATCH --gres=gpu:8" in script.stdout, script.stderr


def test_a_budget_counts_its_price(cli: Cli, tmp_path: Path) -> None:
    refused = cli("manifest", run_file(tmp_path), "--to", "trainjob", "--set", "budget.usd=50")
    assert refused.returncode == 7, refused.stderr


@pytest.mark.parametrize(
    "command", [["submit", "--dry-run"], ["measure", "--dry-run"], ["doctor", "--dry-run"], ["iam"]]
)
def test_commands_for_training_jobs_refuse_it_in_one_line(
    cli: Cli, tmp_path: Path, command: list[str]
) -> None:
    name, *options = command
    refused = cli(name, run_file(tmp_path), *options)
    assert refused.returncode == 2
    [line] = refused.stderr.strip().splitlines()
    assert "is a machine of your own, which SageMaker does not have" in line

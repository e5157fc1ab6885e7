"""Tests of ``sm-train check``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import Cli
from tests.support.cluster.training_jobs import write_shards
from tests.support.run_documents import stage
from tests.support.run_files import write_run


def findings(cli: Cli, run: Path, code: int, *more: str, **options: Any) -> dict[str, str]:
    result = cli("check", run, "--json", *more, **options)
    assert result.returncode == code, result.stderr
    document = json.loads(result.stdout)
    assert document["ok"] == (code == 0)
    assert all(
        set(finding) == {"level", "code", "where", "message", "fix"}
        for finding in document["findings"]
    )
    return {finding["code"]: finding["level"] for finding in document["findings"]}


def run_with_local_shards(tmp_path: Path, shards: int, **changes: Any) -> Path:
    write_shards(tmp_path / "shards", shards=shards, each=2)
    data = {"uri": "s3://ai-bucket/shards/", "local": "shards"}
    return write_run(tmp_path, data=data, **changes)


def test_valid_run_is_ok(cli: Cli, tmp_path: Path) -> None:
    assert findings(cli, run_with_local_shards(tmp_path, 4), 0, "--offline") == {
        "smddp-tradeoff": "info",
        "order-depends-on-ranks": "info",
        "shared-shards": "info",
        "small-shards": "info",
    }


def test_fewer_shards_than_instances_is_an_error(cli: Cli, tmp_path: Path) -> None:
    assert (
        findings(cli, run_with_local_shards(tmp_path, 3), 3, "--offline")["idle-instances"]
        == "error"
    )


def test_indivisible_shards_are_a_warning(cli: Cli, tmp_path: Path) -> None:
    assert (
        findings(cli, run_with_local_shards(tmp_path, 6), 0, "--offline")["unequal-instances"]
        == "warning"
    )


def test_truncated_shard_is_an_error(cli: Cli, tmp_path: Path) -> None:
    run = run_with_local_shards(tmp_path, 4)
    shard = tmp_path / "shards" / "shard-002.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    result = cli("check", run, "--offline")
    assert result.returncode == 3
    assert "broken-shard" in result.stderr
    assert "shard-002.tar" in result.stderr


def test_exceeded_budget_and_runtime_are_errors(cli: Cli, tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        stages=[stage(), stage("512px", resolution=512, max_steps=10, steps_per_second=None)],
        cluster={"instance_type": "ml.p4de.24xlarge", "max_runtime": "15m"},
        budget={"usd": 1},
    )
    found = findings(cli, run, 3, "--offline")
    assert found["over-budget"] == "error"
    assert found["max-runtime-short"] == "error"
    assert found["throughput-unmeasured"] == "warning"
    priceless = write_run(tmp_path, cluster={"instance_type": "ml.p5e.48xlarge"})
    assert findings(cli, priceless, 0, "--offline")["price-unknown"] == "warning"


def test_only_offline_works_without_credentials(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert cli("check", run).returncode == 4
    assert cli("check", run, "--offline").returncode == 0


def test_offline_checks_load_neither_torch_nor_aws_sdks() -> None:
    program = "import sys, sm_train.toolkit.checks.preflight\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "boto3", "botocore", "sagemaker"} & set(loaded)


def memory_findings(
    cli: Cli, tmp_path: Path, preset: str, code: int, **keys: Any
) -> list[dict[str, str]]:
    stages = [stage(steps_per_second=None, **keys)]
    run = write_run(tmp_path, model={"preset": preset}, stages=stages)
    result = cli("check", run, "--offline", "--json")
    assert result.returncode == code, result.stderr
    found: list[dict[str, str]] = json.loads(result.stdout)["findings"]
    return [finding for finding in found if finding["code"].startswith("memory")]


def test_stage_exceeding_gpu_memory_is_an_error_with_a_fix(cli: Cli, tmp_path: Path) -> None:
    assert memory_findings(cli, tmp_path, "sd2", 0, per_device_batch_size=64) == []
    keys: dict[str, Any] = {"per_device_batch_size": 4}
    [short] = memory_findings(cli, tmp_path, "mmdit-20b", 3, **keys)
    assert (short["level"], short["where"]) == ("error", "stages[0].per_device_batch_size")
    assert "GiB of each A100-SXM4-80GB's 80" in short["message"]
    assert short["fix"] == "set sharding: shard_grad_op"
    keys["sharding"] = "full_shard"
    assert memory_findings(cli, tmp_path, "mmdit-20b", 0, **keys) == []
    keys["resolution"] = 1024
    [short] = memory_findings(cli, tmp_path, "mmdit-20b", 3, **keys)
    assert short["fix"] == "set per_device_batch_size: 1, gradient_accumulation_steps: 8"
    keys["activation_checkpointing"] = True
    assert memory_findings(cli, tmp_path, "mmdit-20b", 0, **keys) == []


def test_stage_barely_fitting_gpu_memory_is_a_warning(cli: Cli, tmp_path: Path) -> None:
    [tight] = memory_findings(cli, tmp_path, "sd2", 0, per_device_batch_size=12, resolution=1024)
    assert (tight["code"], tight["level"]) == ("memory-tight", "warning")

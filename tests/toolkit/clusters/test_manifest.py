"""``sm-train manifest``: what it prints, writes and uploads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import Aws, Cli
from tests.support.run_documents import stage
from tests.support.run_files import write_run

KUBERNETES = {"image": "ghcr.io/team/train:1"}


def run_file(tmp_path: Path) -> Path:
    stages = [stage("256px"), stage("512px", instances=8)]
    sections = {"kubernetes": KUBERNETES, "slurm": {"shared_folder": "/fsx"}}
    return write_run(tmp_path, stages=stages, **sections)


def test_manifest_is_on_standard_output_and_the_commands_on_standard_error(
    cli: Cli, tmp_path: Path
) -> None:
    result = cli("manifest", run_file(tmp_path), "--to", "pytorchjob", "--stage", "512px")
    assert result.returncode == 0, result.stderr
    kinds = [manifest["kind"] for manifest in yaml.safe_load_all(result.stdout)]
    assert kinds == ["PersistentVolume", "PersistentVolumeClaim", "PyTorchJob"]
    assert "kubectl apply -f demo-512px.yaml" in result.stderr
    assert "kubectl delete -n default pytorchjob/demo-512px" in result.stderr
    assert "--stage-code" in result.stderr
    quiet = cli("manifest", run_file(tmp_path), "--to", "pytorchjob", "--stage", "512px", "-q")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_out_and_json(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "job.sbatch"
    command = ["manifest", run_file(tmp_path), "--to", "slurm", "--out", out]
    result = cli(*command)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert f"sbatch {out}" in result.stderr
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~_umask()
    document = json.loads(cli(*command, "--json").stdout)
    assert document["script"] == out.read_text()
    assert document["target"] == "slurm"
    assert document["code_uri"].endswith("/sourcedir.tar.gz")
    assert document["bundle"]["sha256"] in out.read_text()
    assert not document["code_staged"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_stage_code_uploads_the_bundle_that_the_manifest_names(
    cli: Cli, tmp_path: Path, aws: Aws
) -> None:
    """Its bucket may deny every object without the run's key."""
    aws.make_bucket("ai-bucket")
    aws.required_keys["ai-bucket"] = "alias/train"
    command = ["manifest", run_file(tmp_path), "--to", "trainjob", "--stage-code", "--json"]
    command += ["--set", "output_kms_key=alias/train"]
    result = cli(*command, network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    bucket, _, key = document["code_uri"].removeprefix("s3://").partition("/")
    content = aws.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
    assert hashlib.sha256(content).hexdigest() == document["bundle"]["sha256"]
    assert document["code_staged"]
    assert "ai-bucket=alias/train" in json.dumps(document["objects"])


def test_a_budget_that_the_run_exceeds_refuses_its_manifest(cli: Cli, tmp_path: Path) -> None:
    run = run_file(tmp_path)
    command = ["manifest", run, "--to", "trainjob", "--out", tmp_path / "job.yaml"]
    result = cli(*command, "--set", "budget.usd=5")
    assert result.returncode == 7
    assert re.match(r"sm-train: budget.usd: the run costs .*, more than \$5.00; ", result.stderr)
    assert not (tmp_path / "job.yaml").exists()
    result = cli(*command, "--set", "budget.usd=5", "--set", "budget.on_exceed=warn")
    assert result.returncode == 0
    assert result.stderr.startswith("warning: budget.usd: the run costs ")


def test_too_little_gpu_memory_is_a_warning_of_the_manifest(cli: Cli, tmp_path: Path) -> None:
    stages = [stage("256px", steps_per_second=None, per_device_batch_size=64)]
    model = {"preset": "mmdit-20b", "prediction_type": "flow"}
    run = write_run(tmp_path, stages=stages, model=model, kubernetes=KUBERNETES)
    result = cli("manifest", run, "--to", "trainjob")
    assert result.returncode == 0, result.stderr
    assert "warning: 256px does not fit: it needs about " in result.stderr


def test_values_of_documentation_refuse_a_manifest(cli: Cli, tmp_path: Path) -> None:
    command = ["manifest", run_file(tmp_path), "--to", "trainjob", "--set"]
    result = cli(*command, "kubernetes.image=registry.example.com/train:1")
    assert (result.returncode, result.stderr) == (
        2,
        "sm-train: kubernetes.image: registry.example.com is a placeholder; write your own "
        "registry\n",
    )


def test_mistakes_are_one_line_and_exit_code_2(cli: Cli, tmp_path: Path) -> None:
    run = run_file(tmp_path)
    out = tmp_path / "missing" / "job.yaml"
    for arguments, message in [
        (["--to", "trainjob", "--stage", "1px"], "--stage: '1px' is not in the run file"),
        (["--to", "trainjob", "--set", "kubernetes.image=null"], "kubernetes.image: not set"),
        (["--to", "trainjob", "--set", "kubernetes.efa=99"], "kubernetes.efa: 99: ml.p4"),
        (["--to", "trainjob", "--out", out], f"--out: {out}: No such file or directory"),
        (["--to", "slurm", "--set", "slurm.shared_folder=null"], "slurm.shared_folder: not set"),
    ]:
        result = cli("manifest", run, *arguments)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert result.stdout == ""
    assert not out.parent.exists()


def test_pods_read_s3_where_training_jobs_mount_a_file_system(cli: Cli, tmp_path: Path) -> None:
    file_system = {"id": "fs-01234567", "type": "EFS", "directory": "/shards"}
    settings: dict[str, Any] = {
        "kubernetes": KUBERNETES,
        "cluster": {
            "instance_type": "ml.p4d.24xlarge",
            "vpc": {"subnets": ["subnet-1"], "security_groups": ["sg-1"]},
        },
        "data": {"uri": "s3://ai-bucket/shards/", "file_system": file_system},
    }
    result = cli("manifest", write_run(tmp_path, **settings), "--to", "trainjob")
    assert result.returncode == 0, result.stderr
    assert "fs-01234567" not in result.stdout
    assert "s3://ai-bucket/shards/" in result.stdout
    settings["channels"] = {"words": {"file_system": file_system}}
    refused = cli("manifest", write_run(tmp_path, **settings), "--to", "trainjob")
    assert refused.returncode == 2
    assert refused.stderr.startswith("sm-train: channels.words.uri: not set; only training jobs")


def test_smddp_becomes_nccl_with_a_warning(cli: Cli, tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        kubernetes=KUBERNETES,
        cluster={"instance_type": "ml.p4d.24xlarge", "backend": "smddp"},
    )
    result = cli("manifest", run, "--to", "trainjob")
    assert result.returncode == 0
    assert "warning: cluster.backend: smddp exists in training jobs only" in result.stderr


def test_fsdp_with_smddp_is_refused_as_for_a_training_job(cli: Cli, tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        kubernetes=KUBERNETES,
        stages=[stage(sharding="full_shard")],
        cluster={"instance_type": "ml.p4d.24xlarge", "backend": "smddp"},
    )
    result = cli("manifest", run, "--to", "trainjob")
    assert result.returncode == 2
    assert "FSDP2 needs a newer PyTorch than SMDDP's" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1

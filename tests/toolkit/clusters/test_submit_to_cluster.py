"""`submit --to kubernetes` runs the machine's kubectl: here one that records its calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.conftest import Aws, Cli
from tests.support.moto_server import ACCOUNT
from tests.support.run_files import one_line, write_run

SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}
KUBECTL = """#!/bin/bash
echo "$*" >>"{folder}/calls"
case "$*" in
    *--dry-run=server*) [ ! -e "{folder}/refuses" ] || {{ cat "{folder}/refuses" >&2; exit 1; }} ;;
    get*) cat "{folder}/queue" 2>/dev/null ;;
    apply*) cp "${{@: -1}}" "{folder}/applied"; echo "trainjob.trainer.kubeflow.org/demo created" ;;
esac
exit 0
"""


@pytest.fixture
def kubectl(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(KUBECTL.format(folder=folder))
    (folder / "kubectl").chmod(0o755)
    return folder


def run_file(tmp_path: Path) -> Path:
    image = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/train:1"
    return write_run(tmp_path, kubernetes={"image": image, "namespace": "art"})


def test_a_trainjob_is_applied_after_the_servers_dry_run(
    cli: Cli, aws: Aws, tmp_path: Path, kubectl: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    path = run_file(tmp_path)
    found = {"PATH": f"{kubectl}:/usr/bin:/bin", **aws.environment}
    command = ("submit", path, "--to", "kubernetes", "--yes")
    (kubectl / "refuses").write_text('error: unknown field "spec.trainer.nodes"\n')
    refused = cli(*command, network="loopback", env=found)
    assert refused.returncode == 3, refused.stderr
    assert 'unknown field "spec.trainer.nodes"' in one_line(refused.stderr)
    assert not (kubectl / "applied").exists()
    (kubectl / "refuses").unlink()

    (kubectl / "queue").write_text("trainjob.trainer.kubeflow.org/demo-256px\n")
    running = cli(*command, network="loopback", env=found)
    assert "256px: the cluster has trainjob.trainer.kubeflow.org/demo-256px" in running.stderr
    (kubectl / "queue").unlink()

    started = cli(*command, "--json", network="loopback", env=found)
    assert started.returncode == 0, started.stderr
    assert "created" in json.loads(started.stdout)["job"]
    kinds = [each["kind"] for each in yaml.safe_load_all((kubectl / "applied").read_text())]
    assert {"TrainingRuntime", "TrainJob"} <= set(kinds)
    key = json.loads(started.stdout)["code_uri"].removeprefix("s3://ai-bucket/")
    aws.client("s3").head_object(Bucket="ai-bucket", Key=key)
    calls = (kubectl / "calls").read_text().splitlines()
    assert calls[-1] == f"apply -f {tmp_path / 'demo-256px.yaml'}"

    # No pod has started, and the commands know the job all the same.
    status = cli("status", path, "--json", network="loopback", env=found)
    document = json.loads(status.stdout)
    assert document["state"] == "waiting"
    assert document["next_command"].startswith("kubectl get -n art trainjob,pods")
    resumed = cli("resume", path, "--yes", network="loopback", env=found)
    assert resumed.returncode == 2
    assert "is a run on Kubernetes; this command works on SageMaker" in one_line(resumed.stderr)


def test_a_machine_without_kubectl_gets_the_command_that_writes_the_manifest(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    found = {"PATH": str(tmp_path), **aws.environment}
    command = ("submit", run_file(tmp_path), "--to", "trainjob", "--yes")
    refused = cli(*command, network="loopback", env=found)
    assert refused.returncode == 2
    assert "kubectl is not on this machine; `sm-train manifest RUN --to trainjob" in refused.stderr


@pytest.mark.parametrize("option", ["--auto-advance", "--follow", "--request", "--local"])
def test_options_of_jobs_on_sagemaker_are_refused(cli: Cli, tmp_path: Path, option: str) -> None:
    refused = cli("submit", run_file(tmp_path), "--to", "slurm", option)
    assert refused.returncode == 2
    assert f"{option}: applies to jobs on SageMaker" in one_line(refused.stderr)

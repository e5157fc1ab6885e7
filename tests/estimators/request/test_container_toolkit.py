"""AWS's container toolkit turns a request into the expected ``smddprun`` command.

The toolkit is that of AWS's PyTorch images (PyPI: sagemaker-training, sagemaker-pytorch-training;
``make test`` installs them; images carry older releases). It reads the configuration
files that SageMaker writes for a request, downloads the bundle from S3, selects its runner and
builds the command. Only AWS can prove that the image has mpirun, smddprun and mpi4py, that the
hosts reach each other by ssh, and that the all-reduce then runs over EFA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sm_train.estimators.bundle.bundle import Bundle, build_bundle
from sm_train.estimators.request.images import image_uri
from sm_train.estimators.request.launch_plan import framework_version, launch_plans
from sm_train.estimators.request.request_patch import additions
from sm_train.estimators.request.training_request import hyperparameter, training_requests
from sm_train.estimators.sdk.model_trainer import create_training_job

from tests.conftest import Aws, clean_environment
from tests.estimators.request.efa_variables_support import EFA_VARIABLE, documented
from tests.support.deadline import DEADLINE
from tests.support.moto_server import aws_session
from tests.support.run_documents import ECR, config, stage

pytestmark = pytest.mark.integration

pytest.importorskip(
    "sagemaker_pytorch_container", reason="make test installs it if gcc is available"
)

# The toolkit's main function, up to the point where it would start sshd and mpirun.
PROGRAM = """
import json, sys
import sagemaker_pytorch_container.training as container
from sagemaker_training import environment, files, runner, smdataparallel

def print_command(uri, user_entry_point, args, env_vars, capture_error, runner_type):
    files.download_and_extract(uri, environment.code_dir)
    selected = runner.get(runner_type, user_entry_point, args, env_vars)
    command = []
    if isinstance(selected, smdataparallel.SMDataParallelRunner):
        script = super(smdataparallel.SMDataParallelRunner, selected)._create_command()
        command = selected._create_command() + script
    print(json.dumps({"runner": type(selected).__name__, "command": command}), file=sys.stderr)

container.entry_point.run = print_command
container.main()
"""
HOSTS = ["127.0.0.1", "127.0.0.2"]


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def write_platform_files(base: Path, request: Any, host: str) -> None:
    """Write the configuration files that SageMaker creates in the container for a request."""
    config_folder = base / "input" / "config"
    write_json(config_folder / "hyperparameters.json", request["HyperParameters"])
    resources = {
        "current_host": host,
        "hosts": HOSTS,
        "network_interface_name": "eth0",
        "current_instance_type": request["ResourceConfig"]["InstanceType"],
    }
    write_json(config_folder / "resourceconfig.json", resources)
    channels = {
        channel["ChannelName"]: {"TrainingInputMode": channel["InputMode"]}
        for channel in request["InputDataConfig"]
    }
    write_json(config_folder / "inputdataconfig.json", channels)


def toolkit_command(base: Path, aws: Aws) -> dict[str, Any]:
    """Run the toolkit with fake tools; return its runner and command."""
    tools = base / "bin"
    tools.mkdir()
    for name, text in (
        ("nvidia-smi", "seq -f 'GPU %g: A100' 8"),
        ("smddprun", "true"),
        ("mpirun", "true"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environment = clean_environment(base) | aws.environment
    environment |= {
        "SAGEMAKER_BASE_DIR": str(base),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    # The toolkit's own download, which runs with the job's role, names no owner.
    assert all("sourcedir.tar.gz" in request for request in aws.without_owner)
    aws.without_owner.clear()
    started: dict[str, Any] = json.loads(result.stderr.splitlines()[-1])
    return started


def send_request(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, *, cluster: dict[str, Any], **changes: Any
) -> tuple[Any, Bundle]:
    """Submit a job; return the request as it was sent, and the bundle that it stages."""
    aws.make_bucket("ai-bucket")
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    run = config(cluster={"instance_type": "ml.p4de.24xlarge"} | cluster, **changes)
    bundle = build_bundle(run, framework_version(run))
    [request] = training_requests(
        run,
        launch_plans(run, run.stages[:1], image_uri(run, "us-east-1")),
        bundle,
        region="us-east-1",
        now=datetime(2026, 11, 20),
    )
    session = aws_session()
    create_training_job(
        request, bundle, boto_session=session, bucket="ai-bucket", added=additions(run.cluster)
    )
    [sent] = aws.bodies("CreateTrainingJob")
    return sent, bundle


@pytest.mark.slow
def test_toolkit_starts_smddprun(aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent, bundle = send_request(
        aws, monkeypatch, stages=[stage("1e3")], cluster={"backend": "smddp"}
    )
    write_platform_files(tmp_path, sent, HOSTS[0])
    started = toolkit_command(tmp_path, aws)
    assert started["runner"] == "SMDataParallelRunner"
    command = started["command"]
    assert command[:5] == ["mpirun", "--host", "127.0.0.1:8,127.0.0.2:8", "-np", "16"]
    for variable in (
        "SMDATAPARALLEL_USE_HOMOGENEOUS=1",
        "SMDATAPARALLEL_SERVER_ADDR=127.0.0.1",
        "SAGEMAKER_INSTANCE_TYPE=ml.p4de.24xlarge",
        "FI_PROVIDER=efa",
        "NCCL_DEBUG=INFO",
        "FI_EFA_USE_DEVICE_RDMA=1",
    ):
        assert command[command.index(variable) - 1] == "-x"
    passed = {word for option, word in pairwise(command) if option == "-x"}
    assert {key for key in passed if EFA_VARIABLE.match(key)} == documented()["ml.p4de.24xlarge"][1]
    script = command[command.index("smddprun") + 1 :]
    assert script[1:] == ["-m", "mpi4py", "train.py", "--stage", "1e3"]
    # The script starts in the folder of the training code.
    code = tmp_path / "code"
    extracted = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    assert extracted == {file.path for file in bundle.files}
    # The other hosts wait for the first.
    other = tmp_path / "other"
    other.mkdir()
    write_platform_files(other, sent, HOSTS[1])
    assert toolkit_command(other, aws)["runner"] == "WorkerRunner"


def test_isolated_toolkit_unpacks_the_code_channel(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the base folder differs from the container's, which is /opt/ml."""
    cluster = {"backend": "smddp", "image": ECR, "network_isolation": True}
    sent, bundle = send_request(aws, monkeypatch, cluster=cluster)
    parameters = sent["HyperParameters"]
    directory = hyperparameter(sent, "sagemaker_submit_directory")
    assert directory is not None
    archive = tmp_path / Path(directory).relative_to("/opt/ml")
    archive.parent.mkdir(parents=True)
    archive.write_bytes(bundle.archive)
    parameters["sagemaker_submit_directory"] = str(archive)
    write_platform_files(tmp_path, sent, HOSTS[0])
    started = toolkit_command(tmp_path, aws)
    assert started["command"][-2:] == ["--stage", "256px"]
    assert not (tmp_path / "code" / "requirements.txt").exists()

"""``init``: by flags, by defaults, and as a wizard that reads the AWS account."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sm_train.cost.instances import instance_type, instance_types
from sm_train.estimators.config.load import load_document, load_run
from sm_train.estimators.config.presets import preset_names
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.checks.memory import memory_findings
from sm_train.toolkit.init.template import Values, fill, placeholders_in, read_template
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.run_file.placeholders import find_placeholders

from tests.conftest import Aws, Cli
from tests.support.fake_services import fake_server, fake_service_quotas
from tests.support.moto_server import ACCOUNT
from tests.support.run_files import one_line
from tests.toolkit.commands.terminal_process import terminal_process

ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"
FLAGS = ("--region=eu-west-1", f"--role={ROLE}", "--bucket=photos", "--data=s3://photos/shards/")


def trust(service: str) -> str:
    principal = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return json.dumps({"Version": "2012-10-17", "Statement": [principal]})


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["default", "bria-2.0", "demo"])
def test_flags_replace_every_placeholder_and_keep_comments(
    cli: Cli, tmp_path: Path, preset: str
) -> None:
    result = cli("init", "--preset", preset, *FLAGS, "--name=cats", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"path": "run.yaml", "placeholders": []}
    path = tmp_path / "run.yaml"
    run = load_run(path)
    assert (run.name, run.region, run.role, run.bucket) == ("cats", "eu-west-1", ROLE, "photos")
    assert run.data.uri == "s3://photos/shards/"
    assert find_placeholders(run) == []
    text = path.read_text()
    assert "my-bucket" not in text
    assert "111122223333" not in text
    assert text.count("#") == read_template(preset).count("#") - (preset == "default")
    assert cli("submit", "run.yaml", "--dry-run").returncode == 0


def test_preset_for_kubernetes_asks_for_image_and_rdma_resource(cli: Cli, tmp_path: Path) -> None:
    """It needs no role, and no instance type of AWS."""
    result = cli("init", "--preset", "infiniband-20b", "--data=s3://photos/shards/")
    assert result.stderr.splitlines() == [
        "Wrote run.yaml",
        "Fill in: kubernetes.image",
        "Next: sm-train manifest run.yaml --to trainjob",
    ]
    flags = ("--image=ghcr.io/team/train:1", "--rdma-resource=rdma/ib", "--force")
    result = cli("init", "--preset", "infiniband-20b", "--data=s3://photos/shards/", *flags)
    assert result.returncode == 0, result.stderr
    run = load_run(tmp_path / "run.yaml")
    assert run.kubernetes.image == "ghcr.io/team/train:1"
    assert run.kubernetes.network.resources == {"rdma/ib": 1}
    assert find_placeholders(run) == []
    for option in ("--image=a/b:1", "--rdma-resource=rdma/ib"):
        error = one_line(cli("init", "other.yaml", option).stderr)
        assert error == (
            f"sm-train: {option.partition('=')[0]}: the run file has no section kubernetes; use it "
            "with --preset infiniband-20b"
        )


def test_placeholders_that_remain_are_named(cli: Cli) -> None:
    result = cli("init", "--data=s3://photos/shards/")
    assert result.stderr.splitlines() == [
        "Wrote run.yaml",
        "Fill in: role",
        "Next: sm-train submit run.yaml --dry-run",
    ]


def test_defaults_are_filled_in(cli: Cli, tmp_path: Path) -> None:
    cli("config", "set", "role", ROLE)
    assert cli("init", env={"SM_TRAIN_BUCKET": "photos"}).returncode == 0
    run = load_run(tmp_path / "run.yaml")
    assert (run.role, run.bucket) == (ROLE, "photos")


@pytest.mark.integration
@given(
    st.sampled_from([kind.name for kind in instance_types() if kind.trains]),
    st.sampled_from([1, 2, 3, 4, 5, 8, 16, 24, 32]),
)
def test_effective_batch_size_is_kept_on_any_cluster(name: str, instances: int) -> None:
    gpus = instances * instance_type(name).accelerators
    values = Values(instance_type=name, instances=instances)
    if 2048 % gpus:
        with pytest.raises(UserError, match=f"{gpus} GPUs do not divide"):
            fill(read_template("default"), values)
        return
    text = fill(read_template("default"), values)
    placeholders_in(text, "run.yaml")  # the run file is valid
    assert "effective_batch_size: 2048" in text
    assert f"× {gpus} GPUs" in text


@pytest.mark.parametrize(
    "values",
    [
        *(Values(model=name) for name in preset_names()),
        Values(model="sdxl", instance_type="ml.g5.48xlarge", instances=8),
        Values(model="mmdit-20b", instance_type="ml.p5.48xlarge", instances=16),
    ],
    ids=lambda values: f"{values.model}-{values.instance_type}",
)
def test_stages_of_any_model_fit_in_memory(values: Values) -> None:
    text = fill(read_template("default"), values)
    config = with_sharding(load_document(yaml.safe_load(text), (), "run.yaml"))
    assert [finding.message for finding in memory_findings(config)] == []
    assert "effective_batch_size: 2048" in text
    assert "866 M" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role=sm-train"], "--role: 'sm-train' must be a role ARN"),
        (["--bucket=s3://photos"], "--bucket: 's3://photos' must be a bucket name"),
        (["--data=photos"], "--data: 'photos' must be an S3 URI"),
        (
            ["--region=us-est-1"],
            "--region: 'us-est-1' is not an AWS region; did you mean",
        ),
        (["--model=flux"], "--model: 'flux' is not one of"),
        (["--instance-type=ml.p5.48xlrage"], "--instance-type: 'ml.p5.48xlrage' is not a known"),
        (["--instances=3"], "--instances: 24 GPUs do not divide the effective batch of 2048"),
        (["--preset=bria-2.0", "--instances=2"], "--instances: the run file has 3 stages"),
    ],
)
def test_mistake_in_a_flag_writes_nothing(
    cli: Cli, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = cli("init", *arguments)
    assert result.returncode == 2
    assert one_line(result.stderr).startswith(f"sm-train: {message}")
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(
    ("preset", "hint"),
    [
        ("tiny", "Did you mean 'tiny-pixels'?"),
        ("bria", "Did you mean 'bria-2.0'?"),
        ("sdxl", "It is a model: --model sdxl."),
        ("sd3", "Models are chosen with --model; for Stable Diffusion 3 write mmdit-2b (medium)"),
        ("flux", "Models are chosen with --model; no preset has the size of FLUX.1"),
    ],
)
def test_unknown_preset_gets_a_hint(cli: Cli, preset: str, hint: str) -> None:
    result = cli("init", "--preset", preset)
    assert result.returncode == 2
    assert hint in result.stderr


def test_wizard_offers_what_the_account_has(aws: Aws, tmp_path: Path) -> None:
    iam = aws.client("iam")
    for name, service in (("training", "sagemaker"), ("lambda", "lambda")):
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust(f"{service}.amazonaws.com"))
    aws.make_bucket("photos")
    quotas = {
        "ml.p5.48xlarge for training job usage": 0.0,
        "ml.g5.12xlarge for training job usage": 2.0,
        "ml.g5.xlarge for training job usage": 4.0,
    }
    with fake_server(fake_service_quotas(quotas)) as service_quotas:
        env = aws.environment | {"AWS_ENDPOINT_URL_SERVICE_QUOTAS": service_quotas.url}
        with terminal_process(["init"], cwd=tmp_path, env=env) as process:
            process.expect("Name of the run [my-model]:")
            process.send("my cats\n")
            process.expect("Error: 'my cats' must be letters and digits")
            process.send("cats\n")
            process.expect("AWS region [us-east-1]:")
            process.send("\n")
            process.expect(f"AWS account {ACCOUNT}")
            process.expect("IAM role of the jobs: number or another value [1]:")
            process.send("\n")
            process.expect("Bucket for checkpoints and results: number or another value [1]:")
            process.send("1\n")
            process.expect("Training data (S3 prefix) [s3://photos/shards/]:")
            process.send("\n")
            process.expect("Instance type: number or another type [1]:")
            process.send("3\n")
            process.expect("Error: 3 is not from 1 to 2")
            process.send("1\n")
            assert process.finish() == 0, process.output
            assert "role/lambda" not in process.output
            assert "p5.48xlarge" not in process.output
            assert "Next: sm-train submit run.yaml --dry-run" in process.output
    run = load_run(tmp_path / "run.yaml")
    assert (run.name, run.role, run.bucket) == ("cats", ROLE, "photos")
    assert run.cluster.instance_type == "ml.g5.12xlarge"
    assert find_placeholders(run) == []


def test_wizard_works_without_credentials_and_ctrl_c_writes_nothing(tmp_path: Path) -> None:
    with terminal_process(["init", *FLAGS[:1], "--name=cats"], cwd=tmp_path) as process:
        process.expect("No AWS account to read values from")
        process.expect("IAM role of the jobs (empty: fill in later):")
        process.send("\n")
        process.expect("Bucket")
        process.send("\x03")
        assert process.finish() == 130
    assert list(tmp_path.glob("run.yaml")) == []


def test_wizard_never_asks_without_a_terminal(cli: Cli, tmp_path: Path) -> None:
    """Pipes and CI jobs would wait forever."""
    assert cli("init", stdin="").returncode == 0
    with terminal_process(["init", "other.yaml", "--no-input"], cwd=tmp_path) as process:
        assert process.finish() == 0
        assert "Name of the run" not in process.output

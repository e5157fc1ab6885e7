"""``submit`` against a fake AWS: what is shown is sent, and errors are one line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from sm_train.estimators.bundle.bundle import unpack
from sm_train.estimators.request.training_request import hyperparameter, stage_name
from sm_train.estimators.sdk.model_trainer import without_timestamps

from tests.conftest import Aws, Cli, clean_environment
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.run_documents import stage
from tests.support.run_files import one_line, write_run
from tests.support.shard_files import expiring_index

SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}


def dry_run(cli: Cli, run: Path, *more: str) -> dict[str, Any]:
    result = cli("submit", run, "--dry-run", "--json", *more)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_dry_run_needs_neither_network_nor_credentials(cli: Cli, tmp_path: Path) -> None:
    """The ``cli`` fixture blocks sockets and clears all credentials."""
    run = write_run(tmp_path, stages=[stage("a"), stage("b")])
    document = dry_run(cli, run)
    assert [stage_name(request) for request in document["requests"]] == ["a", "b"]
    assert document["cost"]["total"]["cost_usd"] > 0
    assert document["bundle"]["files"]
    assert len(document["bundle"]["sha256"]) == 64


@pytest.mark.integration
def test_dry_run_of_each_preset_works_unchanged(cli: Cli, tmp_path: Path) -> None:
    for preset in ("default", "bria-2.0", "demo"):
        assert cli("init", f"{preset}.yaml", "--preset", preset).returncode == 0
        assert dry_run(cli, tmp_path / f"{preset}.yaml")["requests"]


def test_plan_shows_cluster_launch_and_cost(cli: Cli, tmp_path: Path) -> None:
    stages = [stage(), stage("512px", resolution=512, steps_per_second=None)]
    cluster = {"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}
    result = cli("submit", write_run(tmp_path, stages=stages, cluster=cluster), "--dry-run")
    assert result.returncode == 0, result.stderr
    plan = " ".join(result.stdout.split())
    for expected in (
        "4 × ml.p4de.24xlarge",
        "SMDDP all-reduce",
        "it/s of 512px: estimated",
    ):
        assert expected in plan
    # The plan is the result; a speed that was not measured is marked.
    assert re.search(r"512px +\d+ × \S+ +\d+ +\d+ +[\d,]+ +~", result.stdout)
    assert "MetricDefinitions" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    printed = cli("submit", tmp_path / "run.yaml", "--request")
    assert printed.returncode == 0, printed.stderr
    decoder, text, names = json.JSONDecoder(), printed.stdout, []
    while text.strip():
        document, end = decoder.raw_decode(text)
        names.append(stage_name(document))
        text = text[end:].lstrip()
    assert names == ["256px", "512px"]


@pytest.mark.slow
def test_plan_and_question_name_what_starts_now_and_the_whole_run(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    run = write_run(tmp_path, stages=[stage("a", max_steps=10_000), stage("b")])
    cost = json.loads(cli("cost", run, "--json").stdout)
    first, whole = (f"${amount['cost_usd']:,.0f}" for amount in (cost["stages"][0], cost["total"]))
    assert first != whole
    planned = cli("submit", run, "--dry-run", "--stage", "a")
    assert f"starts now a, {first} of {whole}" in " ".join(planned.stdout.split())
    assert re.search(r"^b +4 ×", planned.stdout, re.MULTILINE)
    declined = cli("submit", run, network="loopback", env=aws.environment, stdin="n\n")
    assert f"Start a, {first} of {whole}? [y/N]" in declined.stderr
    only = write_run(tmp_path, stages=[stage("a", max_steps=10_000)])
    declined = cli("submit", only, network="loopback", env=aws.environment, stdin="n\n")
    assert f"Start a, {first}? [y/N]" in declined.stderr


@pytest.mark.slow
def test_plan_shows_what_changed_since_the_last_job(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    stages = [stage("a", learning_rate=1e-4), stage("b")]
    options = {"network": "loopback", "env": aws.environment}
    run = write_run(tmp_path, stages=stages)
    first = cli("submit", run, "--dry-run", **options)
    assert "since" not in first.stdout, first.stderr
    started = cli("submit", run, "--yes", "--json", **options)
    job = json.loads(started.stdout)["training_job_name"]
    same = cli("submit", run, "--dry-run", **options)
    assert f"No changes since {job} (20" in same.stdout
    stages[0]["learning_rate"] = 2e-4
    run = write_run(tmp_path, stages=[*stages, stage("c")], tags={"team": "imaging"})
    changed = cli("submit", run, "--dry-run", **options)
    lines = [" ".join(line.split()) for line in changed.stdout.splitlines()]
    assert "stages.a.learning_rate 0.0001 → 0.0002" in lines
    assert "tags.team not set → imaging" in lines
    assert any(line.startswith("stages.c not set → {") for line in lines)
    # Asked for on a terminal as well, before the job starts.
    asked = cli("submit", run, "--stage", "b", **options, stdin="n\n")
    assert "stages.a.learning_rate" in asked.stderr
    document = json.loads(cli("submit", run, "--dry-run", "--json", **options).stdout)
    keys = {
        change["key"]: (change["before"], change["after"]) for change in document["changes"]["keys"]
    }
    assert document["changes"]["job"] == job
    assert keys["stages.a.learning_rate"] == (1e-4, 2e-4)
    assert set(keys) == {"stages.a.learning_rate", "stages.c", "tags.team"}
    # A dry run works without the account, too.
    aws.error_codes["ListTrainingJobs"] = "AccessDeniedException"
    denied = cli("submit", run, "--dry-run", **options)
    assert denied.returncode == 0
    assert "warning: not compared with the last job: ListTrainingJobs" in denied.stderr
    assert "Plan for demo" in denied.stdout


@pytest.mark.integration
def test_the_plan_names_samples_that_expire_before_the_run_ends(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    rows = [("2020-01-01", "a"), ("2199-01-01", "b")]
    index = expiring_index(tmp_path, rows)
    aws.make_bucket("ai-bucket", **SHARDS | {"index.parquet": index})
    run = write_run(tmp_path)
    for arguments in (("--dry-run",), ("--yes",)):
        done = cli("submit", run, *arguments, network="loopback", env=aws.environment)
        assert done.returncode == 0, done.stderr
        plan = " ".join(f"{done.stdout} {done.stderr}".split())
        assert "Warning data.expiry: 1 of 2 samples expire before the run ends" in plan
        assert "000000000 on 2020-01-01" in plan


@pytest.mark.parametrize("backend", ["smddp", "nccl"])
def test_sent_request_equals_the_dry_run(cli: Cli, aws: Aws, tmp_path: Path, backend: str) -> None:
    """Other settings of the run file: tests/estimators/sdk/test_wire.py."""
    aws.make_bucket("ai-bucket", **SHARDS)
    run = write_run(
        tmp_path,
        cluster={"instance_type": "ml.p4de.24xlarge", "backend": backend},
        tags={"team": "imaging"},
    )
    [shown] = dry_run(cli, run)["requests"]
    result = cli("submit", run, "--yes", "--json", network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    [sent] = aws.bodies("CreateTrainingJob")
    assert without_timestamps(sent) == without_timestamps(shown)
    assert json.loads(result.stdout)["training_job_name"] == sent["TrainingJobName"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["smddp", "nccl"])
def test_staged_bundle_holds_the_listed_files_and_runs(
    cli: Cli, aws: Aws, tmp_path: Path, backend: str
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    run = write_run(tmp_path, cluster={"instance_type": "ml.p4de.24xlarge", "backend": backend})
    listed = dry_run(cli, run)["bundle"]
    result = cli("submit", run, "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    [sent] = aws.bodies("CreateTrainingJob")
    archive = aws.client("s3").get_object(**_bundle_location(sent))["Body"].read()
    assert len(archive) == listed["bytes"]
    folder = tmp_path / "code"
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {file["path"] for file in listed["files"]}
    # The job knows its hourly price, for the cost of a stall in alerts.
    document = json.loads((folder / "job.json").read_text())
    price = dry_run(cli, run)["cost"]["stages"][0]["price_per_instance_hour_usd"]
    assert document["256px"]["expected"]["usd_per_instance_hour"] == pytest.approx(price)
    # It runs: the training code itself rejects an unknown stage.
    ran = subprocess.run(
        [sys.executable, "train.py", "--stage", "nonsense"],
        cwd=folder,
        env=clean_environment(tmp_path) | {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert "nonsense" in ran.stdout + ran.stderr
    assert "256px" in ran.stdout + ran.stderr


def _bundle_location(request: dict[str, Any]) -> dict[str, str]:
    uris = [
        channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in request["InputDataConfig"]
        if channel["ChannelName"] == "code"
    ]
    uri = [*uris, hyperparameter(request, "sagemaker_submit_directory")][0]
    assert uri is not None
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}


def test_submit_starts_the_first_stage_and_prints_the_next_command(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    run = write_run(tmp_path, stages=[stage("a"), stage("b")])
    result = cli("submit", run, "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    [sent] = aws.bodies("CreateTrainingJob")
    assert stage_name(sent) == "a"
    assert "--stage b" in result.stderr


@pytest.mark.slow
def test_clone_reruns_a_jobs_run_and_code_under_a_new_name(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    code = tmp_path / "code"
    code.mkdir()
    (code / "own.py").write_text("print('as it was')")
    run = write_run(tmp_path, cluster={"instance_type": "ml.p5.48xlarge"}, code="code")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "code"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    options = {"network": "loopback", "env": aws.environment}
    first = cli("submit", run, "--yes", "--json", **options)
    assert first.returncode == 0, first.stderr
    job = json.loads(first.stdout)["training_job_name"]
    run.unlink()
    (code / "own.py").write_text("changed since")
    clone = cli(
        "--region",
        "us-east-1",
        "submit",
        "--clone",
        job,
        "--set",
        "stages.256px.learning_rate=2.0e-4",
        "--yes",
        "--json",
        **options,
    )
    assert clone.returncode == 0, clone.stderr
    earlier, sent = aws.bodies("CreateTrainingJob")
    assert sent["TrainingJobName"] == "demo-r2--256px-0001"
    assert sent["CheckpointConfig"]["S3Uri"] == "s3://ai-bucket/demo-r2/checkpoints/256px/"
    bundles = [
        unpack(aws.client("s3").get_object(**_bundle_location(request))["Body"].read())
        for request in (earlier, sent)
    ]
    changed = {name for name in bundles[0] if bundles[0][name] != bundles[1][name]}
    assert changed == {"run.json", "job.json"}
    assert bundles[1]["own.py"] == b"print('as it was')"
    assert json.loads(bundles[1]["run.json"])["stages"][0]["learning_rate"] == 2e-4
    commits = [
        [tag["Value"] for tag in request["Tags"] if tag["Key"] == "sm-train:commit"]
        for request in (earlier, sent)
    ]
    assert commits[0] == commits[1]
    assert re.fullmatch("[0-9a-f]{40}", commits[0][0])


@pytest.mark.integration
def test_clone_of_an_unknown_or_foreign_job_is_one_line(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    options = {"network": "loopback", "env": aws.environment | {"AWS_REGION": "us-east-1"}}
    unknown = cli("submit", "--clone", "nothing", **options)
    assert unknown.returncode != 0
    assert "--clone: nothing: AWS returned" in one_line(unknown.stderr)
    aws.client("sagemaker").create_training_job(
        TrainingJobName="theirs",
        AlgorithmSpecification={"TrainingImage": "a", "TrainingInputMode": "File"},
        RoleArn="arn:aws:iam::210987654321:role/sm-train",
        OutputDataConfig={"S3OutputPath": "s3://a/b"},
        ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        StoppingCondition={"MaxRuntimeInSeconds": 60},
    )
    foreign = cli("submit", "--clone", "theirs", **options)
    assert foreign.returncode == 2
    assert "theirs was not started by sm-train" in one_line(foreign.stderr)
    for arguments in ([], [tmp_path / "run.yaml", "--clone", "theirs"]):
        invalid = cli("submit", *arguments)
        assert invalid.returncode == 2
        assert "give a run file, or --clone JOB" in one_line(invalid.stderr)


@pytest.mark.slow
def test_plan_shows_warnings_and_alternatives(cli: Cli, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "own.py").write_text("")
    (code / "weights.bin").write_bytes(os.urandom(50_100_000))
    cluster = {"instance_type": "ml.g6e.48xlarge", "alternatives": ["ml.g6e.12xlarge"]}
    run = write_run(tmp_path, cluster=cluster, code="code", entry="own.py")
    result = cli("submit", run, "--dry-run")
    assert result.returncode == 0, result.stderr
    plan = " ".join(result.stdout.split())
    assert "8 × ml.g6e.12xlarge, $105 an hour; the same batch" in plan
    assert "starts own.py" in plan
    assert "the bundle has 51 MB" in plan
    assert "weights.bin (50 MB)" in plan
    (code / ".smtrainignore").write_text("*.bin")
    assert "Warning" not in cli("submit", run, "--dry-run").stdout


def test_secret_in_user_code_stops_the_submission(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("\ntoken = 'hf_" + "a" * 34 + "'\n")
    result = cli("submit", write_run(tmp_path, code="."), "--dry-run")
    assert result.returncode == 2
    line = one_line(result.stderr)
    assert "own.py:2: looks like a Hugging Face token" in line
    assert "aaaa" not in line


@pytest.mark.slow
@pytest.mark.integration
def test_nothing_is_sent_without_confirmation(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    run = write_run(tmp_path)
    declined = cli("submit", run, network="loopback", env=aws.environment, stdin="n\n")
    no_input = cli("submit", run, network="loopback", env=aws.environment, stdin="")
    assert declined.returncode == 130
    assert "$" in declined.stderr
    assert no_input.returncode == 2
    assert "--yes" in no_input.stderr
    assert aws.bodies("CreateTrainingJob") == []
    agreed = cli("submit", run, network="loopback", env=aws.environment, stdin="y\n")
    assert agreed.returncode == 0
    assert len(aws.bodies("CreateTrainingJob")) == 1


def test_missing_credentials_exit_with_4(cli: Cli, tmp_path: Path) -> None:
    result = cli("submit", write_run(tmp_path), "--yes")
    assert result.returncode == 4
    assert "credentials" in one_line(result.stderr)


def test_missing_role_exits_with_4_except_in_a_dry_run(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path, role=None)
    result = cli("submit", run, "--yes")
    assert result.returncode == 4
    assert "role: not set" in one_line(result.stderr)
    shown = cli("submit", run, "--dry-run")
    assert shown.returncode == 0
    assert "role: not in the run file" in shown.stdout


def test_missing_region_exits_with_2(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path, region=None)
    assert cli("submit", run, "--dry-run").returncode == 2
    named = cli("--region", "us-west-2", "submit", run, "--dry-run", "--json")
    assert named.returncode == 0, named.stderr
    assert (
        "us-west-2"
        in json.loads(named.stdout)["requests"][0]["AlgorithmSpecification"]["TrainingImage"]
    )


def test_missing_bucket_exits_with_4(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    result = cli("submit", write_run(tmp_path), "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 4
    assert "bucket ai-bucket does not exist" in one_line(result.stderr)


def test_bucket_in_another_region_exits_with_3(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    aws.make_bucket("far-away", "eu-west-1")
    run = write_run(tmp_path, data={"uri": "s3://far-away/shards/"})
    result = cli("submit", run, "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 3
    assert "far-away is in eu-west-1" in one_line(result.stderr)
    assert aws.bodies("CreateTrainingJob") == []


def test_fewer_shards_than_instances_exit_with_3(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **{"shards/0.tar": b"x"})
    result = cli("submit", write_run(tmp_path), "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 3
    assert "1 objects for 4 instances" in one_line(result.stderr)


def test_alternatives_with_more_instances_need_more_shards(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    cluster = {"instance_type": "ml.g6e.48xlarge", "alternatives": ["ml.g6e.12xlarge"]}
    run = write_run(tmp_path, cluster=cluster)
    result = cli("submit", run, "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 3
    assert "4 objects for 8 instances" in one_line(result.stderr)


def test_data_uri_of_a_single_object_exits_with_3(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **{"one": b"x", **SHARDS})
    run = write_run(tmp_path, data={"uri": "s3://ai-bucket/one"})
    result = cli("submit", run, "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 3
    assert "is a single object" in one_line(result.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ResourceLimitExceeded", 5),
        ("AccessDeniedException", 4),
        ("ExpiredTokenException", 4),
        ("ValidationException", 3),
    ],
)
def test_aws_error_is_one_line_with_its_exit_code(
    cli: Cli, aws: Aws, tmp_path: Path, code: str, expected: int
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    aws.error_codes["CreateTrainingJob"] = code
    result = cli("submit", write_run(tmp_path), "--yes", network="loopback", env=aws.environment)
    assert result.returncode == expected, result.stderr
    assert f"AWS returned {code}: rejected by the test" in one_line(result.stderr)


@pytest.mark.slow
def test_rejected_job_can_be_submitted_again_at_once(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    """The claim on the job's name is released."""
    aws.make_bucket("ai-bucket", **SHARDS)
    aws.error_codes["CreateTrainingJob"] = "ResourceLimitExceeded"
    run, options = write_run(tmp_path), {"network": "loopback", "env": aws.environment}
    assert cli("submit", run, "--yes", **options).returncode == 5
    aws.error_codes.clear()
    result = cli("submit", run, "--yes", "--json", **options)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["training_job_name"] == "demo--256px-0001"


def test_over_budget_exits_with_7_and_sends_nothing(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    run = write_run(tmp_path, budget={"usd": 1})
    assert cli("submit", run, "--dry-run").returncode == 7
    result = cli("submit", run, "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 7
    assert aws.bodies("CreateTrainingJob") == []
    warning_run = write_run(tmp_path, budget={"usd": 1, "on_exceed": "warn"})
    result = cli("submit", warning_run, "--yes", network="loopback", env=aws.environment)
    assert result.returncode == 0, result.stderr
    assert "warning: budget.usd" in result.stderr


def test_budget_without_a_price_cannot_be_enforced(cli: Cli, tmp_path: Path) -> None:
    cluster = {"instance_type": "ml.p5e.48xlarge", "backend": "nccl"}
    run = write_run(tmp_path, cluster=cluster, budget={"usd": 1e6})
    result = cli("submit", run, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "warning: budget.usd: $1,000,000: it cannot be enforced" in result.stderr


def test_invalid_run_file_exits_with_2_and_reports_all_errors(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path, color="red", region="moon")
    result = cli("submit", run, "--dry-run")
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 2
    assert cli("submit", tmp_path / "none.yaml").returncode == 2


@pytest.mark.parametrize("command", [["submit", "--dry-run"], ["check", "--offline"], ["cost"]])
def test_absurd_values_are_reported_in_one_line(
    cli: Cli, tmp_path: Path, command: list[str]
) -> None:
    run = write_run(tmp_path, stages=[stage(steps_per_second=1e-300)])
    result = cli(command[0], run, *command[1:])
    assert result.returncode == 2
    assert "steps_per_second" in one_line(result.stderr)


def test_unknown_stage_error_lists_the_stages(cli: Cli, tmp_path: Path) -> None:
    result = cli("submit", write_run(tmp_path), "--dry-run", "--stage", "512px")
    assert result.returncode == 2
    assert "it has 256px" in one_line(result.stderr)


def test_region_without_an_image_is_one_line(cli: Cli, tmp_path: Path) -> None:
    result = cli("--region", "moon-west-1", "submit", write_run(tmp_path), "--dry-run")
    assert result.returncode == 2
    assert "moon-west-1" in one_line(result.stderr)


@pytest.mark.integration
def test_quiet_prints_the_jobs_name(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    options = ("--yes", "--quiet")
    run = write_run(tmp_path)
    result = cli("submit", run, *options, network="loopback", env=aws.environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == "demo--256px-0001"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "reason", "code", "outcome"),
    [
        ("Completed", None, 0, "the run is done"),
        ("Failed", "AlgorithmError: ExecuteUserScriptError", 6, "failed: "),
        ("Stopped", None, 0, "was stopped; `sm-train resume` continues it"),
        ("Failed", "CapacityError: Insufficient capacity", 5, "got no instances"),
    ],
)
def test_follow_ends_with_the_job(
    cli: Cli,
    aws: Aws,
    tmp_path: Path,
    status: str,
    reason: str | None,
    code: int,
    outcome: str,
) -> None:
    """The exit code is that of the job's outcome."""
    aws.make_bucket("ai-bucket", **SHARDS)
    sagemaker = FakeSageMaker(aws)
    start = aws.response_filters["CreateTrainingJob"]

    def end_at_once(response: dict[str, Any]) -> dict[str, Any]:
        started = start(response)
        name = started["TrainingJobArn"].rsplit("/", 1)[1]
        sagemaker.set_status(name, status, reason=reason, seconds=1.0)
        if status == "Completed":
            sagemaker.checkpoint("256px", 1000)
        return started

    aws.response_filters["CreateTrainingJob"] = end_at_once
    run = write_run(tmp_path, recovery={"max_attempts": 1})
    result = cli("submit", run, "--yes", "--follow", network="loopback", env=aws.environment)
    assert result.returncode == code, result.stderr
    assert outcome in result.stderr
    assert sagemaker.names() == ["demo--256px-0001"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "3"], "--steps: requires --local"),
        (["--follow", "--dry-run"], "--follow: applies to a job that is started"),
        (["--follow", "--local"], "--follow: applies to a job that is started; remove --local"),
        (["--follow", "--json"], "--follow: cannot be combined with --json"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    cli: Cli, tmp_path: Path, options: list[str], message: str
) -> None:
    result = cli("submit", write_run(tmp_path), *options)
    assert result.returncode == 2
    assert one_line(result.stderr).startswith(f"sm-train: {message}")


def test_placeholders_are_refused_before_any_call(cli: Cli, tmp_path: Path) -> None:
    role = "arn:aws:iam::111122223333:role/sm-train"
    run = write_run(tmp_path, role=role, data={"uri": "s3://my-bucket/shards/"})
    refused = cli("submit", run, "--yes")
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "sm-train: role: 111122223333 is a placeholder; write your own account's ID",
        "sm-train: data.uri: my-bucket is a placeholder; write your own bucket",
    ]
    planned = cli("submit", run, "--dry-run")
    assert planned.returncode == 0
    assert "Warning role: 111122223333 is a placeholder" in planned.stdout
    checked = cli("check", run, "--offline", "--json")
    assert checked.returncode == 3
    found = [
        load for load in json.loads(checked.stdout)["findings"] if load["code"] == "placeholder"
    ]
    assert [finding["where"] for finding in found] == ["role", "data.uri"]

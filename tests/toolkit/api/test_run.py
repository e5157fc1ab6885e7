"""``sm_train.Run``: what the command line shows, as values."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import sm_train
from sm_train.entrypoints.base.pip_install import install_command
from sm_train.estimators.sdk.model_trainer import without_timestamps
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.submit.run_bundle import bundle_of

from tests.conftest import Aws, Cli, clean_environment
from tests.support.image_files import write_album
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.run_documents import run, stage
from tests.support.run_files import write_run
from tests.toolkit.api import run_support
from tests.wheel_files import build_wheel

account = run_support.account

STAGES = [stage("a"), stage("b", resolution=512, steps_per_second=None)]


def python(
    program: str, folder: Path, *paths: Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a new interpreter; ``paths`` come before the installed packages."""
    environment = clean_environment(folder)
    if paths:
        environment["PYTHONPATH"] = ":".join(map(str, paths))
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd or folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_loads_neither_torch_nor_aws(tmp_path: Path) -> None:
    """Nor does an estimate need them, or the SDK."""
    write_run(tmp_path)
    heavy = "{'torch', 'boto3', 'botocore', 'sagemaker', 'pandas', 'diffusers'} & set(sys.modules)"
    program = f"""
import sys, sm_train
assert not {{'pydantic', 'click', 'numpy'}} & set(sys.modules), sys.modules.keys()
print({heavy}, sm_train.__version__, 'Run' in dir(sm_train))
assert sm_train.Run.load("run.yaml").cost().total > 0
print({heavy})
"""
    result = python(program, tmp_path)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("set() 0.")
    assert first.endswith("True")
    assert second == "set()"


def test_every_public_name_exists() -> None:
    assert all(getattr(sm_train, name) is not None for name in sm_train.__all__)
    assert {"Run", "Job", "pack", "sample", "ShardDataset", "Error"} <= set(sm_train.__all__)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (ExitCode.UNEXPECTED, "ServiceError"),
        (ExitCode.USAGE, "UsageError"),
        (ExitCode.PREFLIGHT, "PreflightError"),
        (ExitCode.PERMISSION, "AccessError"),
        (ExitCode.CAPACITY, "CapacityError"),
        (ExitCode.JOB_FAILED, "JobFailedError"),
        (ExitCode.OVER_BUDGET, "OverBudgetError"),
        (ExitCode.STALLED, "StalledError"),
    ],
)
def test_each_exit_code_has_its_error(code: ExitCode, name: str) -> None:
    error = UserError("message", code)
    assert type(error) is getattr(sm_train, name)
    assert isinstance(error, sm_train.Error)
    assert error.exit_code == code
    assert type(error)("message").exit_code == code


def test_cost_is_that_of_the_command(cli: Cli, tmp_path: Path) -> None:
    path = write_run(tmp_path, stages=STAGES)
    printed = json.loads(cli("cost", path, "--json").stdout)
    cost = sm_train.Run.load(path).cost()
    assert cost.document == printed
    assert (cost.total, cost.low, cost.high) == (
        printed["total"]["cost_usd"],
        printed["total"]["cost_low_usd"],
        printed["total"]["cost_high_usd"],
    )
    assert [stage.name for stage in cost.stages] == ["a", "b"]
    assert [stage.is_measured for stage in cost.stages] == [True, False]
    assert sum(stage.total or 0 for stage in cost.stages) == pytest.approx(cost.total)
    assert len(repr(cost)) < 80
    assert len(repr(sm_train.Run.load(path))) < 80
    with pytest.raises(FrozenInstanceError):
        cost.document = {}  # type: ignore[misc]
    estimate = sm_train.Run.load(path).cost("a", assume={"start_up_seconds": 0})
    assert len(estimate.stages) == 1
    assert (estimate.total or 0) < (cost.stages[0].total or 0)


def test_cost_in_a_notebook_is_a_table() -> None:
    frame = sm_train.Run.from_dict(run(stages=STAGES)).cost().to_frame()
    assert list(frame["name"]) == ["a", "b"]
    assert {"total", "low", "high", "instances", "steps_per_second"} <= set(frame.columns)
    document = run(stages=STAGES)
    page = sm_train.Run.from_dict(document).cost()._repr_html_()
    assert page.count("<tr>") == 4  # the header, two stages and the total
    assert "4 × ml.p4de.24xlarge" in page
    assert ">1.8<" in page
    assert ">~" in page
    assert "not measured on this stage" in page


def test_without_pandas_to_frame_names_the_extra(tmp_path: Path) -> None:
    write_run(tmp_path)
    program = """
import sys
sys.modules["pandas"] = None
import sm_train
sm_train.Run.load("run.yaml").cost().to_frame()
"""
    result = python(program, tmp_path)
    last = result.stderr.splitlines()[-1]
    assert last.endswith(f"to_frame() needs it: {install_command('notebook')}")
    assert "UsageError: pandas: is not installed" in last


def test_checks_are_those_of_the_command(cli: Cli, tmp_path: Path) -> None:
    path = write_run(tmp_path, stages=STAGES)
    printed = json.loads(cli("check", path, "--offline", "--json").stdout)
    checks = sm_train.Run.load(path).check(offline=True)
    assert checks.ok is printed["ok"]
    assert [vars(finding) for finding in checks.findings] == printed["findings"]
    assert len(repr(checks)) < 80
    assert "throughput-unmeasured" in checks._repr_html_()
    failing = sm_train.Run.from_dict(
        run(stages=[stage(per_device_batch_size=512, steps_per_second=0.02)])
    )
    failed = failing.check(offline=True)
    assert not failed.ok
    with pytest.raises(sm_train.PreflightError, match=failed.errors[0].where.split("[")[0]):
        failed.require_ok()
    with pytest.raises(sm_train.UsageError, match="s3://… needs AWS"):
        failing.check(offline=True, components="s3://bucket/model")


def test_request_is_that_of_the_command(cli: Cli, tmp_path: Path) -> None:
    path = write_run(tmp_path, stages=STAGES)
    printed = json.loads(cli("submit", path, "--request", "--stage", "b").stdout)
    request = sm_train.Run.load(path).request("b")
    assert without_timestamps(request) == without_timestamps(printed)
    assert request["TrainingJobName"] == "demo--b-0001"
    assert sm_train.Run.load(path).request()["TrainingJobName"] == "demo--a-0001"
    with pytest.raises(sm_train.UsageError, match="it has a, b"):
        sm_train.Run.load(path).request("c")


def test_invalid_runs_are_usage_errors(tmp_path: Path) -> None:
    document = run(color="red")
    with pytest.raises(sm_train.UsageError, match="color"):
        sm_train.Run.from_dict(document)
    assert document == run(color="red")
    with pytest.raises(sm_train.UsageError, match="no such file"):
        sm_train.Run.load(tmp_path / "none.yaml")
    changed = sm_train.Run.load(write_run(tmp_path), set=["stages.256px.instances=8"])
    assert changed.config.stages[0].instances == 8
    with pytest.raises(sm_train.Error, match="steps_per_second"):
        sm_train.Run.from_dict(run(stages=[stage(steps_per_second=1e-300)])).cost()


@pytest.mark.slow
def test_trainer_is_the_sdks_and_starts_the_planned_job(account: Aws) -> None:
    from sagemaker.train import ModelTrainer

    FakeSageMaker(account)
    planned = sm_train.Run.from_dict(run())
    request, trainer = planned.request(), planned.trainer()
    assert isinstance(trainer, ModelTrainer)
    assert account.bodies("CreateTrainingJob") == []
    trainer.train(wait=False)
    [sent] = account.bodies("CreateTrainingJob")
    assert without_timestamps(sent) == without_timestamps(request)
    # It is recorded as `submit` records it: the run is found by its name, and has one live job.
    assert sm_train.Job("demo", "us-east-1").status().stages[0].job == "demo--256px-0001"
    with pytest.raises(sm_train.UsageError, match="demo--256px-0001 is InProgress"):
        planned.trainer()


@pytest.mark.integration
def test_trainer_of_a_taken_name_starts_nothing(account: Aws) -> None:
    FakeSageMaker(account)
    planned = sm_train.Run.from_dict(run())
    first, second = planned.trainer(), planned.trainer()
    first.train(wait=False)
    with pytest.raises(sm_train.Error, match="starting it"):
        second.train(wait=False)
    assert len(account.bodies("CreateTrainingJob")) == 1


@pytest.mark.slow
def test_submit_returns_the_job(account: Aws) -> None:
    fake = FakeSageMaker(account)
    job = sm_train.Run.from_dict(run(budget={"usd": 0.01, "on_exceed": "warn"}))
    with pytest.warns(UserWarning, match="budget.usd: the run costs"):
        started = job.submit(auto_advance=True)
    assert started.name == "demo--256px-0001"
    assert fake.tags(started.name)["sm-train:auto-advance"] == "on"
    over = sm_train.Run.from_dict(run(name="other", budget={"usd": 0.01}))
    with pytest.raises(sm_train.OverBudgetError):
        over.submit()
    with pytest.raises(sm_train.AccessError, match="role"):
        sm_train.Run.from_dict(run(role=None)).submit()
    assert len(account.bodies("CreateTrainingJob")) == 1


def test_pack_returns_what_the_command_prints(cli: Cli, tmp_path: Path) -> None:
    album = write_album(tmp_path / "album", 6)
    run_file = write_run(tmp_path, stages=[stage(instances=2)])
    (album / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    (album / "broken.txt").write_text("a caption")
    packed = sm_train.pack(album, tmp_path / "a", shard_size="4KB", instances=2, workers=1)
    assert (packed.samples, packed.up_to_date) == (6, False)
    assert packed.shards % 2 == 0
    assert sum(packed.rejected_by_reason.values()) == 1
    assert len(repr(packed)) < 80
    again = cli("pack", album, tmp_path / "a", "--shard-size", "4KB", "--for", run_file, "--json")
    assert again.returncode == 0, again.stderr
    printed = json.loads(again.stdout)
    assert (packed.samples, packed.bytes) == (printed["samples"], printed["bytes"])
    assert packed.shards_path == str(tmp_path / "a" / "shards")
    with pytest.raises(sm_train.UsageError, match="latents"):
        sm_train.pack(album, tmp_path / "b", resolution=64)


@pytest.mark.slow
def test_a_bundle_names_what_works_only_on_a_laptop(tmp_path: Path) -> None:
    """In a job, `import sm_train` has the building blocks and the version that made the bundle."""
    bundle = bundle_of(sm_train.Run.from_dict(run()).config, tmp_path)
    folder = tmp_path / "code"
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as tar:
        tar.extractall(folder, filter="data")
    program = """
import sm_train, sys
assert sm_train.__file__.startswith(sys.argv[1]), sm_train.__file__
print(sm_train.__version__, sm_train.ShardDataset.__name__)
for name in ("Run", "Job", "pack", "UsageError"):
    try:
        getattr(sm_train, name)
    except sm_train.Error as error:
        print(error)
from sm_train import sample
"""
    program = program.replace("sys.argv[1]", repr(str(folder)))
    result = python(program, tmp_path, folder, cwd=folder)
    version, *lines = result.stdout.splitlines()
    assert version == f"{sm_train.__version__} ShardDataset", result.stderr
    assert [line.split(" works ")[0] for line in lines] == [
        "sm_train.Run",
        "sm_train.Job",
        "sm_train.pack",
        "sm_train.UsageError",
    ]
    assert all("not in a job: a job has ShardDataset" in line for line in lines)
    assert "Error: sm_train.sample works on a laptop" in result.stderr.splitlines()[-1]


@pytest.mark.integration
def test_a_users_program_type_checks_in_strict_mode(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import sm_train
from sm_train import Job, Run

run: Run = sm_train.Run.load("run.yaml", set=["cluster.retries=5"])
total: float | None = run.cost(measured=["log.txt"]).total
ok: bool = run.check(offline=True).ok
job: Job = run.submit(wait=True)
steps: list[int] = [stage.step for stage in job.status().stages]
lines: list[str] = [entry.message for entry in job.logs(follow=True)]
cause: str = job.diagnose().cause
packed: int = sm_train.pack("a", "b").samples
version: str = sm_train.__version__
run.cost(stages=1)
"""
    )
    # What the wheel installs, in an environment of its own: mypy reads only typed packages there.
    venv.create(tmp_path / "venv", with_pip=False)
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(build_wheel(tmp_path / "wheel")) as archive:
        archive.extractall(site)
    python = tmp_path / "venv" / "bin" / "python"
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, program],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in result.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, result.stdout
    assert 'Unexpected keyword argument "stages" for "cost"' in errors[0]


def test_region_and_profile_are_those_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument, then `SM_TRAIN_*`, the run file, the configuration file and AWS's own."""
    home = tmp_path / "home"
    (home / "sm-train").mkdir(parents=True)
    (home / "sm-train" / "config.toml").write_text('profile = "file"\nregion = "eu-west-1"\n')
    (tmp_path / "aws").write_text(
        "[profile given]\n[profile file]\n[profile environment]\nregion = eu-north-1\n"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    document = run()
    del document["region"]
    loaded = sm_train.Run.from_dict(document)
    assert (loaded.profile, loaded.aws_region) == ("file", "eu-west-1")
    assert sm_train.Job("demo").profile == "file"
    monkeypatch.setenv("SM_TRAIN_PROFILE", "environment")
    monkeypatch.setenv("SM_TRAIN_REGION", "us-west-2")
    loaded = sm_train.Run.from_dict(document | {"region": "us-east-2"})
    assert (loaded.profile, loaded.aws_region) == ("environment", "us-west-2")
    assert sm_train.Job("demo", profile="given").profile == "given"
    given = sm_train.Run.from_dict(document, region="us-east-1", profile="given")
    assert (given.profile, given.aws_region) == ("given", "us-east-1")
    monkeypatch.setenv("SM_TRAIN_PROFILE", "nobody")
    with pytest.raises(sm_train.AccessError, match="profile: 'nobody' is not in the AWS config"):
        sm_train.Run.from_dict(document).trainer()

"""Every command understands the same names of a run, and says what else a text is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.platforms.find_run import parse_target, run_target
from sm_train.toolkit.platforms.target import Kind
from sm_train.toolkit.records.job_logs import LOG_NAME

from tests.conftest import Cli
from tests.support.run_documents import run
from tests.support.run_files import one_line
from tests.toolkit.runs.run_lifecycle_support import FIRST, Laptop, laptop

__all__ = ["laptop"]

FAILURE = "AlgorithmError: rank 3: OutOfMemoryError: CUDA out of memory."
STAGE = "demo--256px"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one of each kind that a target can be."""
    (tmp_path / "run.yaml").touch()
    (tmp_path / "job.log").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "algo-1.log").touch()
    stage = tmp_path / "local-runs" / "demo" / "256px"
    (stage / "bundle").mkdir(parents=True)
    (stage / "bundle" / "run.json").write_text(json.dumps(run()))
    (stage / LOG_NAME).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("s3://photos/run", Kind.ADDRESS),
        ("local-runs/demo", Kind.RUN_FOLDER),
        ("local-runs/demo/256px", Kind.RUN_FOLDER),
        ("demo/256px", Kind.RUN_FOLDER),
        ("run.yaml", Kind.RUN_FILE),
        ("missing.yml", Kind.RUN_FILE),
        ("logs", Kind.FOLDER),
        ("job.log", Kind.FILE),
        ("demo", Kind.NAME),
        (FIRST, Kind.NAME),
    ],
)
@pytest.mark.usefixtures("here")
def test_kind_of_a_target(text: str, kind: Kind) -> None:
    assert parse_target(text).kind is kind


@pytest.mark.parametrize("text", ["missing/folder", "missing.log", "no name", ""])
@pytest.mark.usefixtures("here")
def test_text_that_names_nothing_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        parse_target(text)


@pytest.mark.usefixtures("here")
def test_a_run_is_no_folder_and_no_address() -> None:
    assert run_target("job.log").kind is Kind.RUN_FILE
    # A run may have the name of the folder with its images, as in the tutorial.
    Path("photos").mkdir()
    Path("photos/000.txt").write_text("caption")
    assert run_target("photos").kind is Kind.NAME
    for text, problem in (("logs", "holds no local run"), ("s3://b/x", "is an address in S3")):
        with pytest.raises(UserError, match=f"^{text}: {problem}"):
            run_target(text)


@pytest.mark.parametrize(
    "command",
    [
        ["alarms"],
        ["check"],
        ["cost"],
        ["cost", "--actual"],
        ["diagnose"],
        ["doctor", "--canary"],
        ["iam"],
        ["image"],
        ["logs"],
        ["manifest"],
        ["measure"],
        ["resume"],
        ["review"],
        ["status"],
        ["stop"],
        ["submit"],
        ["watch"],
    ],
    ids=" ".join,
)
def test_an_address_is_shown_as_it_was_written(cli: Cli, command: list[str]) -> None:
    address = "s3://photos/runs/demo"
    name, *options = command
    refused = cli(name, address, *options)
    assert refused.returncode == 2
    assert f"{address}: is an address in S3; name" in one_line(refused.stderr)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("s3://ai-bucket/demo/checkpoints", "demo"),
        ("s3://ai-bucket/demo/checkpoints/256px/", "demo--256px"),
        ("s3://ai-bucket/demo/checkpoints/256px/step-00000100", "demo--256px"),
    ],
)
def test_the_address_of_checkpoints_stands_for_their_run(address: str, name: str) -> None:
    target = run_target(address)
    assert (target.kind, target.text) == (Kind.NAME, name)


@pytest.mark.integration
def test_a_run_its_stage_its_job_and_its_file_name_the_same_run(laptop: Laptop) -> None:
    laptop.sagemaker.log_event(FIRST, "start", ago=400)
    laptop.sagemaker.log_event(FIRST, "step", ago=300, step=400, steps_per_second=2.0, loss=0.5)
    laptop.sagemaker.set_status(FIRST, "Failed", reason=FAILURE, ended_ago=200)
    estimates = []
    address = "s3://ai-bucket/demo/checkpoints/256px"
    targets = ("demo", STAGE, FIRST, str(laptop.run_file), address)
    for target in targets:
        assert laptop.json("status", target)["run"] == "demo"
        assert laptop.json("diagnose", target)["cause"] == "gpu-out-of-memory"
        [reviewed] = laptop.json("review", target)["jobs"]
        assert reviewed["name"] == FIRST
        assert '"step": 400' in laptop("logs", target, "--raw").stdout
        actual = laptop.json("cost", target, "--actual")
        assert [job["name"] for job in actual["jobs"]] == [FIRST]
        estimates.append(laptop.json("cost", target)["total"])
        checked = laptop("check", target, "--offline", "--json")
        assert json.loads(checked.stdout)["ok"]
    assert estimates.count(estimates[0]) == len(targets)


@pytest.mark.integration
def test_check_of_a_submitted_run_says_whose_settings_it_checks(laptop: Laptop) -> None:
    checked = laptop("check", "demo", "--offline", "--set", "training.seed=7")
    assert f"settings as submitted with {FIRST}\n" in checked.stderr
    refused = laptop("check", "demo", "--offline", "--set", "training.seed=x", code=2)
    assert "training.seed" in one_line(refused.stderr)


def test_a_command_for_sagemaker_says_how_a_local_run_continues(
    cli: Cli, tmp_path: Path, here: Path
) -> None:
    (here / "local-runs" / "demo" / ".command").write_text("sm-train submit run.yaml --local\n")
    refused = cli("resume", "local-runs/demo")
    assert refused.returncode == 2
    assert one_line(refused.stderr) == (
        "sm-train: local-runs/demo: is a local run; this command works on SageMaker. To continue: "
        "sm-train submit run.yaml --local"
    )


@pytest.mark.integration
def test_next_command_of_a_stage_on_another_platform(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Stopped", ended_ago=3600)
    laptop.sagemaker.checkpoint("256px", 400, platform="kubernetes")
    # Whether the job there has ended is for the user to say: no suggestion takes it over.
    assert laptop.json("status", "demo")["next_command"] == "sm-train resume demo"
    shown = laptop("status", "demo").stdout
    assert "a job on kubernetes wrote its newest checkpoint" in shown
    assert "--take-over" in shown


@pytest.mark.integration
def test_next_command_of_a_finished_run_samples_from_its_model(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Completed")
    laptop.sagemaker.checkpoint("256px", 1000)
    document = laptop.json("status", "demo")
    assert (document["state"], document["stage"]) == ("done", None)
    assert document["next_command"] == "sm-train sample demo --prompts FILE"

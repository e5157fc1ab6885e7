"""``cost``: what a person and a script get, and what a mistake is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sm_train.entrypoints.events import FIELDS, format_event

from tests.conftest import Cli
from tests.estimators.runs import stage
from tests.toolkit.runs import write_run

CLUSTER = ["--instance", "ml.p4de.24xlarge", "--instances", "4"]


def write_events(folder: Path, speeds: list[float], **changes: object) -> Path:
    start = dict.fromkeys(FIELDS["start"], 1) | {
        "stage": "256px", "resolution": 256, "world_size": 2, "backend": "gloo",
        "effective_batch_size": 64,
    } | changes  # fmt: skip
    lines = ["noise", format_event("start", start, time=0, node=0, rank=0)]
    for number, speed in enumerate(speeds):
        fields = dict.fromkeys(FIELDS["step"], 1) | {
            "step": number, "iterations_per_second": speed
        }  # fmt: skip
        lines.append(format_event("step", fields, time=0, node=0, rank=0))
    path = folder / "events.log"
    path.write_text("\n".join(lines))
    return path


def test_a_cluster_is_priced_offline(cli: Cli) -> None:
    result = cli("cost", *CLUSTER, "--its", "1.8", "--iterations", "550000", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["total"]["cost_usd"] == pytest.approx(10_740, abs=10)
    assert document["stages"][0]["price_source"]


def test_the_table_fits_100_columns_and_says_price_and_assumptions(
    cli: Cli, tmp_path: Path
) -> None:
    cli("init", "bria.yaml", "--preset", "bria-2.0")
    result = cli("cost", "bria.yaml")
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    for expected in ("at least $10,7", "unknown", "$31.5641", "Assumptions", "1024px"):
        assert expected in result.stdout


def test_a_run_is_priced_with_its_own_speeds(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path, stages=[stage("a"), stage("b", iterations_per_second=None)])
    document = json.loads(cli("cost", run, "--json").stdout)
    assert [one["iterations_per_second"] for one in document["stages"]] == [1.8, None]
    assert document["total"]["cost_usd"] is None
    faster = json.loads(cli("cost", run, "--stage", "b", "--its", "2", "--json").stdout)
    assert faster["total"]["cost_usd"] > 0


def test_a_measured_speed_is_the_median_without_the_first_interval(
    cli: Cli, tmp_path: Path
) -> None:
    write_events(tmp_path, [0.1, 2.0, 3.0, 4.0])
    for place in ("events.log", "."):
        result = cli("cost", *CLUSTER, "--measured", place, "--iterations", "10", "--json")
        document = json.loads(result.stdout)
        assert document["stages"][0]["iterations_per_second"] == 3.0
        assert "only an illustration" in document["assumptions"][0]


def test_a_measured_speed_goes_to_its_own_stage_alone(cli: Cli, tmp_path: Path) -> None:
    write_events(tmp_path, [1.0, 2.0])
    stages = [stage(iterations_per_second=None), stage("512px", iterations_per_second=None)]
    run = write_run(tmp_path, stages=stages)
    document = json.loads(cli("cost", run, "--measured", "events.log", "--json").stdout)
    assert [one["iterations_per_second"] for one in document["stages"]] == [2.0, None]
    assert "2 processes" in document["assumptions"][0]


@pytest.mark.parametrize(
    ("changes", "illustration"),
    [
        ({}, False),
        ({"backend": "gloo"}, True),
        ({"world_size": 64}, True),
        ({"resolution": 512}, True),
        ({"effective_batch_size": 2048}, True),
    ],
    ids=str,
)
def test_a_speed_of_other_work_or_machines_is_said_to_be_only_an_illustration(
    cli: Cli, tmp_path: Path, changes: dict[str, object], illustration: bool
) -> None:
    # The run's stage: 4 × 8 GPUs, 8 images × 2 passes each, 256 px.
    same = {"backend": "nccl", "world_size": 32, "effective_batch_size": 512}
    write_events(tmp_path, [1.0, 2.0], **same | changes)
    run = write_run(tmp_path)
    document = json.loads(cli("cost", run, "--measured", "events.log", "--json").stdout)
    assert document["stages"][0]["iterations_per_second"] == 2.0
    assert ("only an illustration" in document["assumptions"][0]) is illustration


def test_a_region_is_taken_in_both_places_and_said_where_it_is_assumed(cli: Cli) -> None:
    cost = ["cost", *CLUSTER, "--its", "1", "--iterations", "5", "--json"]
    for arguments in (["--region", "eu-west-1", *cost], [*cost, "--region", "eu-west-1"]):
        document = json.loads(cli(*arguments).stdout)
        assert "stands in for eu-west-1" in document["stages"][0]["price_source"]
    assumed = json.loads(cli(*cost).stdout)
    assert assumed["assumptions"][0] == "region: us-east-1, as none was given (--region)"


def test_the_widest_table_fits_100_columns_and_loses_no_digit(cli: Cli, tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        stages=[stage("a-stage-of-a-long-name", instances=512, iterations_per_second=1e-6)],
        cluster={"instance_type": "ml.p6-b200.48xlarge"},
    )
    result = cli("cost", run)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "…" not in result.stdout


MISTAKES = {
    "nothing": ([], "RUN or --instance"),
    "no speed": ([*CLUSTER, "--iterations", "5"], "--its: is missing"),
    "no iterations": ([*CLUSTER, "--its", "5"], "--iterations: is missing"),
    "no instances": (["--instance", "ml.p5.48xlarge", "--its", "5"], "--instances: is missing"),
    "zero": ([*CLUSTER, "--its", "0", "--iterations", "5"], "--its: 0.0 must be a positive"),
    "nan": ([*CLUSTER, "--its", "nan", "--iterations", "5"], "--its: nan must be a positive"),
    "infinite": ([*CLUSTER, "--its", "inf", "--iterations", "5"], "--its: inf must be"),
    "negative": ([*CLUSTER, "--its", "1", "--iterations", "-5"], "iterations: -5 must be"),
    "for ever": ([*CLUSTER, "--its", "1e-300", "--iterations", "5"], "take over 100 years"),
    "endless": ([*CLUSTER, "--its", "1", "--iterations", "9" * 400], "must be a positive number"),
    "a stage of nothing": ([*CLUSTER, "--stage", "a"], "--stage: 'a' is one of a run file's"),
    "no such type": (
        ["--instance", "ml.p6", "--instances", "1", "--its", "1", "--iterations", "5"],
        "'ml.p6' is not a known training instance type",
    ),
    "no such file": ([*CLUSTER, "--measured", "none", "--iterations", "5"], "--measured: none"),
    "no events": ([*CLUSTER, "--measured", "run.yaml", "--iterations", "5"], "holds no start"),
    "two speeds": (
        [*CLUSTER, "--measured", "run.yaml", "--its", "1", "--iterations", "5"],
        "both give the it/s",
    ),
    "two clusters": (["run.yaml", "--instances", "5"], "both name the cluster"),
    "one speed for two stages": (["run.yaml", "--its", "1"], "name it with --stage"),
    "no such stage": (["run.yaml", "--stage", "x"], "it has a, b"),
    "no such run": (["none.yaml"], "none.yaml: no such file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(cli: Cli, tmp_path: Path, mistake: str) -> None:
    write_run(tmp_path, stages=[stage("a"), stage("b")])
    arguments, expected = MISTAKES[mistake]
    result = cli("cost", *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert expected in line


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (
            [*CLUSTER, "--its", "1", "--iterations", "5"],
            {"torch", "boto3", "sagemaker", "webdataset", "pydantic", "yaml"},
        ),
        (["run.yaml"], {"torch", "boto3", "sagemaker", "webdataset"}),
    ],
)
def test_pricing_loads_nothing_heavy(
    tmp_path: Path, arguments: list[str], unwanted: set[str]
) -> None:
    write_run(tmp_path)
    program = (
        "import sys\nfrom sm_train.toolkit.cli import main\n"
        f"try:\n    main({['cost', *arguments]!r})\n"
        "finally:\n    print('LOADED', *sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "Assumptions" in result.stdout
    assert not unwanted & set(result.stdout.split("LOADED ")[1].split())

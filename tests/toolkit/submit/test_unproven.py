"""A start for more than $1,000 needs a job or a canary that ran on its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Aws, Cli
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.run_documents import stage
from tests.support.run_files import one_line, write_run

WARM = ("--set", "cluster.capacity=warm-pool", "--set", "cluster.keep_alive_period=30m")
SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}


@pytest.mark.integration
def test_a_large_start_proposes_the_canary_until_a_job_has_run(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    aws.make_bucket("ai-bucket", **SHARDS)
    path = write_run(tmp_path, stages=[stage(max_steps=1_000_000)], budget={"usd": 30_000})

    def submit(*options: str, code: int = 0) -> str:
        done = cli("submit", path, "--yes", *options, network="loopback", env=aws.environment)
        assert done.returncode == code, done.stderr
        return done.stderr

    refused = one_line(submit(code=3))
    assert (
        "no job or canary of the last 90 days has run in us-east-1 on ml.p4de.24xlarge" in refused
    )
    assert (
        f"`sm-train doctor {path} --canary --instance-type ml.p4de.24xlarge` tries it for $"
        in refused
    )
    assert "--unproven starts without" in refused
    assert aws.bodies("CreateTrainingJob") == []

    started = submit("--unproven")
    shown = " ".join(started.split())
    assert "this laptop while `sm-train watch` runs: up to $6.31 more than the budget" in shown
    assert "a laptop that sleeps stops nothing and alerts nobody" in shown
    assert len(aws.bodies("CreateTrainingJob")) == 1

    FakeSageMaker(aws).set_status("demo--256px-0001", "Stopped")
    again = submit("--set", "name=other")
    assert "demo--256px-0001 ran on the same path" in again
    other = one_line(submit("--set", "name=third", *WARM, code=3))
    assert "ml.p4de.24xlarge (warm-pool)" in other
    # What costs less needs none.
    small = ("--set", "name=small", "--set", "stages.256px.max_steps=1000")
    submit(*small, *WARM)

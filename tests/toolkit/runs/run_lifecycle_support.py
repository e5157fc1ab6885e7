"""Helpers of the tests of run lifecycle, which other tests use as well."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sm_train.estimators.bundle.bundle import build_bundle, run_document
from sm_train.estimators.config.load import load_run
from sm_train.estimators.config.naming import staging_uri
from sm_train.estimators.request.launch_plan import launch_plan
from sm_train.estimators.request.training_request import training_request
from sm_train.toolkit.records.launch_record import LaunchRecord
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.submit.relocation import job_launch
from sm_train.toolkit.submit.start_job import start_next_job

from tests.conftest import Aws, Cli
from tests.support.aws.described_jobs import run_on_sagemaker
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.moto_server import aws_session
from tests.support.run_files import write_run

SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}


FIRST, SECOND = "demo--256px-0001", "demo--256px-0002"


class Laptop:
    """A laptop with a run file whose first job was started as by `submit`."""

    def __init__(
        self, cli: Cli, aws: Aws, folder: Path, submit: bool = True, **changes: Any
    ) -> None:
        self.cli, self.aws, self.folder = cli, aws, folder
        self.environment = {
            **aws.environment,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
        }
        self.sagemaker = FakeSageMaker(aws)
        aws.make_bucket("ai-bucket", **SHARDS)
        self.run_file = write_run(folder, **changes)
        if not submit:
            return
        config = load_run(self.run_file)
        first = config.stages[0]
        staged = staging_uri(config, first, "us-east-1", datetime(2026, 11, 20))
        requests = {
            stage.name: training_request(
                config,
                stage,
                launch_plan(config, stage, "own:1"),
                build_bundle(config, None),
                region="us-east-1",
                staged=staged,
            )
            for stage in config.stages
        }
        record = LaunchRecord(run_document(config), requests)
        session = aws_session()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", aws.url)
            start = StartJob(first.name, 1, 0, "submit", "", auto_advance=False)
            run = run_on_sagemaker(config, record, session)
            start_next_job(session, job_launch(run, start))

    def __call__(self, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = self.cli(*arguments, network="loopback", env=self.environment)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def json(self, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self(*arguments, "--json", code=code).stdout)
        return document


@pytest.fixture
def laptop(cli: Cli, aws: Aws, tmp_path: Path) -> Laptop:
    return Laptop(cli, aws, tmp_path)

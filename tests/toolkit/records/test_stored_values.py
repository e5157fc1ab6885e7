"""Records from storage are checked for types and ranges: another value is one error, or ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sm_train.cost.assumptions import Observed
from sm_train.cost.stage import StageProgram
from sm_train.cost.throughput import Measurement
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    FORMAT_VERSION,
    CheckpointFile,
    CheckpointMarker,
    MarkerError,
)
from sm_train.entrypoints.lineage.data_record import (
    Anchor,
    ChannelRecord,
    DataRecord,
    RecordError,
    decode_record,
)
from sm_train.entrypoints.storage.lease import Holder, Lease, read_lease
from sm_train.entrypoints.storage.lease_files import LocalLeaseFiles
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning import history, measured_speeds
from sm_train.toolkit.planning.measured_speeds import MeasuredSpeed
from sm_train.toolkit.records.launch_record import read_record, record_key

from tests.conftest import Aws, Cli
from tests.entrypoints.base.wrong_values import (
    WRONG,
    leaves,
    outcome,
    require_checked,
    with_value,
)
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.moto_server import ACCOUNT, aws_session
from tests.support.run_files import write_run

MARKER = json.loads(
    CheckpointMarker(
        5, 8, "f", (CheckpointFile("data.npz", 3, "ab"), CheckpointFile("x", 4, "cd")), "sagemaker"
    ).to_json()
)
MEASUREMENT = Measurement(
    *("job", 1.8, 32, 256, 2048, "ml.p4de.24xlarge", 3600.0, 1.7, 1.9, False, 8, 1),
    StageProgram("bf16", "fp32", False, "none", False, False, "replicated"),
)
SPEED = MeasuredSpeed(
    *("256px", "w", MEASUREMENT, "job", "2026-11-29", 4, 200, 3686.4, 0.01, 0.4),
    *(10**10, 1e10, "images", {"level": "ok"}, 0.21),
)
HISTORY = {
    "version": history._VERSION,
    "observed": asdict(Observed(2, 10.5, 1, 300.0, 400.0, 0.5, 60.0)),
    "measurements": [asdict(MEASUREMENT)],
}
SPEEDS = {
    "version": measured_speeds._VERSION,
    "speeds": [json.loads(json.dumps(asdict(SPEED)))],
}

RECORD = json.loads(
    DataRecord(
        *("demo", "256px", "demo-1", "indexed", "d1"),
        (ChannelRecord("train", "s3://b/index.parquet", "d1", "content", 9, "a = 1", 2.0),),
        2,
        (Anchor(0, 0, 0, "2026-11-29T00:00:00+00:00", {"train": 3}),),
        "shards.parquet",
        b"state",
        "sagemaker",
    ).encode()
)

READERS: dict[str, tuple[Any, Callable[[bytes], Any], type[Exception]]] = {
    "marker": (MARKER, CheckpointMarker.parse, MarkerError),
    "data record": (RECORD, lambda content: decode_record(content, "r"), RecordError),
    "history": (HISTORY, lambda content: history._parse(content, "s3://b/h"), UserError),
    "speeds": (SPEEDS, lambda content: measured_speeds._parse(content, "s3://b/m"), UserError),
}


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_value_is_one_error_or_is_not_read(name: str) -> None:
    document, read, error = READERS[name]
    require_checked(document, lambda value: read(json.dumps(value).encode()), error)
    with pytest.raises(error):
        read(b"{")


@pytest.mark.parametrize(
    "change",
    [
        {"steps_per_second": 0},
        {"world_size": 0},
        {"world_size": 10**400},
        {"resolution": 0},
        {"effective_batch_size": 0},
        {"low": 100.0},
        {"high": 0.5},
        {"instance_type": "ml.foo"},
    ],
    ids=lambda change: "-".join(change),
)
def test_an_impossible_measurement_is_damaged(change: dict[str, Any]) -> None:
    measurement = json.loads(json.dumps(asdict(MEASUREMENT))) | change
    for document, read in (
        (SPEEDS | {"speeds": [SPEEDS["speeds"][0] | {"measurement": measurement}]}, SPEEDS),
        (HISTORY | {"measurements": [measurement]}, HISTORY),
    ):
        name = "speeds" if read is SPEEDS else "history"
        with pytest.raises(
            UserError, match=rf"damaged \(.*{next(iter(change))}|damaged \(.*ml.foo"
        ):
            READERS[name][1](json.dumps(document).encode())
    for name in ("speeds", "history"):
        with pytest.raises(UserError, match="damaged"):
            READERS[name][1](b"[" * 100_000)


def test_versions_are_named() -> None:
    content = json.dumps(MARKER | {"format": FORMAT_VERSION + 1}).encode()
    with pytest.raises(MarkerError, match=f"this version reads {FORMAT_VERSION}"):
        CheckpointMarker.parse(content)


def test_a_lease_of_wrong_values_is_damaged(tmp_path: Path) -> None:
    files = LocalLeaseFiles(tmp_path)
    Lease(files, "lease.json", Holder("t", "host", 7), {"work": 1}).take(None)
    stored = read_lease(files, "lease.json")
    assert stored is not None
    document = json.loads((tmp_path / "lease.json").read_text())
    for path in leaves(document["holder"]):
        for value in WRONG:
            is_own_type = (path == ("process",) and value == -3) or (
                path in [("token",), ("host",), ("job",)] and isinstance(value, str)
            )
            wrong = document | {"holder": with_value(document["holder"], path, value)}
            (tmp_path / "lease.json").write_text(json.dumps(wrong))
            if is_own_type:
                assert read_lease(files, "lease.json") is not None
                continue
            with pytest.raises(ValueError, match=r"."):
                read_lease(files, "lease.json")


@pytest.mark.integration
def test_a_launch_record_of_wrong_values_is_one_line(
    cli: Cli, aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    shards = {f"shards/{number}.tar": b"x" for number in range(4)}
    aws.make_bucket("ai-bucket", **shards | {"index.parquet": b"x"})
    run = write_run(tmp_path, role=f"arn:aws:iam::{ACCOUNT}:role/sm-train")
    options = {"network": "loopback", "env": aws.environment}
    sent = cli("submit", run, "--yes", "--json", **options)
    assert sent.returncode == 0, sent.stderr
    job = json.loads(sent.stdout)["training_job_name"]
    s3, key = aws.client("s3"), record_key("demo", job)
    document = json.loads(s3.get_object(Bucket="ai-bucket", Key=key)["Body"].read())
    session = aws_session()

    def read(value: Any) -> Any:
        s3.put_object(Bucket="ai-bucket", Key=key, Body=json.dumps(value).encode())
        found = read_record(session, "ai-bucket", "demo", job)
        return {"record": "absent" if found is None else type(found.config).__name__}

    # A request is checked by AWS's model when it is sent.
    fields = [path for path in leaves(document) if len(path) <= (2 if "document" in path else 1)]
    for path in fields:
        for value in WRONG:
            found = outcome(read, with_value(document, path, value), UserError)
            if isinstance(found, str):
                assert "\n" not in found, found
                assert "damaged (" in found
                assert "; give the run file instead of the run's name" in found
    for wrong in ({}, {"other": {}}, None, [], {"256px": 3}):
        refused = outcome(read, document | {"requests": wrong}, UserError)
        assert isinstance(refused, str), wrong

    # With the run file, a record that cannot be read counts as none.
    s3.put_object(Bucket="ai-bucket", Key=key, Body=json.dumps(document | {"placement": "x"}))
    fake = FakeSageMaker(aws)
    fake.set_status(job, "InProgress")
    for command in (("status", run), ("stop", run)):
        done = cli(*command, **options)
        assert done.returncode == 0, done.stderr
        assert "damaged (" in done.stderr
    fake.set_status(job, "Stopped")
    resumed = cli("resume", run, "--yes", **options)
    assert resumed.returncode == 0, resumed.stderr
    assert len(aws.bodies("CreateTrainingJob")) == 2

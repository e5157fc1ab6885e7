"""Experiment trackers: their own readers see each value once, and nothing they do is a failure."""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sm_train.entrypoints.job_interface.events import FIELDS, EventLog, format_event
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.monitoring.heartbeat import (
    create_private_folder,
    heartbeat_folder,
    node_event_file,
)
from sm_train.entrypoints.monitoring.node_event import LastNodeEvent
from sm_train.entrypoints.tracking.feed import TrackerFeed, tracker_feeds
from sm_train.entrypoints.tracking.scalars import STEP_TAGS
from sm_train.entrypoints.tracking.tensorboard_files import TensorBoardFiles
from sm_train.toolkit.records.job_logs import parse_event

from tests.conftest import Mount
from tests.entrypoints.tracking.wandb_server import wandb_server
from tests.support.background_server import serve_in_background
from tests.support.deadline import DEADLINE
from tests.support.moto_server import Aws
from tests.support.run_documents import config, write_job_file

pytestmark = pytest.mark.integration

_FULL = r"disk is full|No space left"
KEY = "a1b2c3d4e5f6" * 4
START = {
    "run": "demo",
    "stage": "256px",
    "resolution": 256,
    "world_size": 2,
    "nodes": 1,
    "per_device_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "effective_batch_size": 32,
    "max_steps": 1000,
    "parameters": 5,
    "backend": "nccl",
    "backend_reason": "auto",
    "precision": "bf16",
    "resumed_from_step": 0,
}


class Job:
    """A job's folder with its configuration; its trackers get the events that a test writes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, trackers: Any) -> None:
        self.checkpoints = folder / "checkpoints"
        (self.checkpoints / "samples").mkdir(parents=True, exist_ok=True)
        self.document = write_job_file(folder, config(trackers=trackers))
        monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(folder))
        monkeypatch.delenv("RANK", raising=False)
        self._monkeypatch = monkeypatch

    def log(
        self, steps: Iterable[int], *, images: Iterable[int] = (), reason: str | None = "done"
    ) -> None:
        """Run a process of the job that logs ``steps`` and ``images`` after some of them."""
        settings = read_job_config(self.document, "256px")
        with tracker_feeds(settings, self.document) as trackers:
            log = EventLog(node=0, rank=0, stream=io.StringIO(), subscriber=trackers.send)
            log.write("start", "", **START)
            for step in steps:
                log.write("step", "", **step_event(step))
                if step in images:
                    name = f"samples/step-{step:08d}.png"
                    Image.new("RGB", (30, 10), (step, 0, 0)).save(self.checkpoints / name)
                    log.write("eval", "", step=step, seconds=1.0, loss=0.5, images=name)
            if reason is not None:
                fields = {"training_seconds": 1.0, "images": 1, "steps_per_second": 1.0}
                log.write("end", "", step=9, reason=reason, **fields)


def step_event(step: int) -> dict[str, Any]:
    values = dict.fromkeys(STEP_TAGS, 0.25) | {"loss": 1 / step, "mfu": None}
    return {"step": step, "epoch": 0, **values}


def warnings(output: str) -> list[tuple[str, str]]:
    events = [event for line in output.splitlines() if (event := parse_event(line))]
    return [(event["code"], event["message"]) for event in events if event["kind"] == "warning"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda trackers: Job(tmp_path, monkeypatch, trackers)


def test_tensorboard_reads_values_times_and_images_of_a_resumed_run_once(
    job: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = job(["tensorboard"])
    made.log([1, 2, 3], images=[2], reason=None)
    # Resumed from step 1; then rolled back to step 3, where a loss was not finite.
    made.log([2, 3, 4, 3, 4, 5], images=[2, 4])
    assert warnings(capfd.readouterr().out) == []
    [folder] = (made.checkpoints / "trackers" / "tensorboard").iterdir()
    assert folder.name == "demo-256px-local"
    read = EventAccumulator(str(folder), purge_orphaned_data=False).Reload()
    losses = read.Scalars("train/loss")
    assert [loss.step for loss in losses] == [1, 2, 3, 4, 5]
    assert [loss.value for loss in losses] == pytest.approx([1 / step for step in range(1, 6)])
    assert abs(losses[0].wall_time - time.time()) < 3600
    assert [scalar.step for scalar in read.Scalars("validation/loss")] == [2, 4]
    images = read.Images("samples")
    assert [(image.step, image.width, image.height) for image in images] == [
        (2, 30, 10),
        (4, 30, 10),
    ]
    assert "speed/mfu" not in read.Tags()["scalars"]


def offline_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the history of offline runs with W&B's own reader, in the order of their folders."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    rows = []
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                names = [item.key or item.nested_key[0] for item in items]
                values = [json.loads(item.value_json) for item in items]
                rows.append(dict(zip(names, values, strict=True)))
    return rows


@pytest.mark.slow
def test_wandb_without_a_secret_writes_each_step_of_a_resumed_run_once(
    job: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    made = job({"wandb": {"project": "ours"}})
    made.log([1, 2, 3], images=[2], reason=None)
    made.log([2, 3, 4], images=[2, 4])
    assert warnings(capfd.readouterr().out) == []
    folder = made.checkpoints / "trackers" / "wandb"
    rows = offline_rows(folder)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "samples" in row] == [2, 4]
    assert len(list(folder.glob("offline-run-*/files/media/images/*.png"))) == 2
    assert {path.name.rpartition("-demo-")[2] for path in folder.glob("offline-run-*")} == {
        "256px-local"
    }


CLOSE_AND_LIST_CHILDREN = """
import sys
from pathlib import Path

import psutil
from sm_train.entrypoints.job_interface.job_config import TrackerConfig
from sm_train.entrypoints.tracking.wandb_tracker import WandbTracker

tracker = WandbTracker(TrackerConfig("wandb"), "demo", "demo", Path(sys.argv[1]) / "wandb", None)
tracker.open({}, print)
tracker.log_scalars(1, 1.0, {"train/loss": 1.0})
tracker.close("done")
for process in psutil.Process().children(recursive=True):
    print(process.name(), process.status())
"""


def test_wandb_has_written_everything_when_it_is_closed(tmp_path: Path) -> None:
    # W&B's service writes its last block when it ends, and it is stopped with its parent.
    command = [sys.executable, "-c", CLOSE_AND_LIST_CHILDREN, str(tmp_path)]
    closed = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert closed.stdout == ""
    assert [row["train/loss"] for row in offline_rows(tmp_path / "wandb")] == [1.0]


def test_wandb_with_a_secret_logs_to_the_server_and_continues_its_run(
    job: Any, aws: Aws, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    aws.client("secretsmanager").create_secret(
        Name="wandb-key", SecretString=json.dumps({"WANDB_API_KEY": KEY})
    )
    with wandb_server() as server:
        made = job({"wandb": {"secret": "wandb-key", "base_url": server.url}})
        made.log([1, 2, 3], reason=None)
        # The folder of a job that was lost before its upload.
        (made.checkpoints / "trackers" / "wandb" / "last-steps.json").unlink()
        made.log([2, 3, 4])
    output = capfd.readouterr()
    assert warnings(output.out) == []
    assert server.run_id == "demo-256px-local"
    assert [row["step"] for row in server.history if "train/loss" in row] == [1, 2, 3, 4]
    assert server.config["learning_rate"]["value"] == 1e-4
    assert server.exit_codes == [1, 0]
    assert all(value is not None and value.startswith("Basic ") for value in server.authorizations)
    assert KEY not in output.out + output.err
    for path in made.checkpoints.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def test_wandb_continues_offline_without_its_server_or_key(
    job: Any, aws: Aws, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    made = job({"wandb": {"secret": "absent", "base_url": "http://127.0.0.1:9"}})
    made.log([1, 2])
    [(code, message)] = warnings(capfd.readouterr().out)
    assert code == "tracker-failed"
    assert "absent: ResourceNotFoundException" in message
    rows = offline_rows(made.checkpoints / "trackers" / "wandb")
    assert [row["step"] for row in rows] == [1, 2]


def test_mlflow_files_continue_one_run(
    job: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = job({"mlflow": {"experiment": "ours"}})
    made.log([1, 2, 3], images=[2], reason=None)
    made.log([2, 3, 4], images=[2, 4])
    assert warnings(capfd.readouterr().out) == []
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    client = mlflow.MlflowClient((made.checkpoints / "trackers" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("ours")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo-256px-local", "FINISHED")
    assert run.data.params["learning_rate"] == "0.0001"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == [1, 2, 3, 4]
    assert [point.value for point in history] == [1 / step for step in range(1, 5)]
    images = client.list_artifacts(run.info.run_id, "samples")
    assert [Path(image.path).name for image in images] == ["step-00000002.png", "step-00000004.png"]


@pytest.mark.parametrize(
    ("secret", "expected"),
    [(KEY, f"Bearer {KEY}"), ('{"username": "me", "password": "p"}', "Basic bWU6cA==")],
)
def test_mlflow_sends_the_key_and_never_logs_it(
    job: Any,
    aws: Aws,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    secret: str,
    expected: str,
) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    aws.client("secretsmanager").create_secret(Name="key", SecretString=secret)
    received: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(self.headers.get("Authorization"))
            # A server that repeats what it got in its error.
            content = json.dumps({"error_code": "INVALID", "message": f"no: {secret}"}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with serve_in_background(server):
        made = job({"mlflow": {"uri": f"http://127.0.0.1:{server.server_port}", "secret": "key"}})
        made.log([1])
    output = capfd.readouterr()
    assert set(received) == {expected}
    codes = [code for code, _ in warnings(output.out)]
    assert codes == ["tracker-failed", "tracker-incomplete"]
    assert KEY not in output.out + output.err
    assert "password" not in output.out + output.err


def fake_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Put a package of the name wandb before the real one."""
    package = folder / "fake"
    package.mkdir()
    (package / "wandb.py").write_text(code)
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_a_tracker_that_raises_is_one_warning(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_wandb(tmp_path, monkeypatch, "raise ValueError('no\\nluck')")
    job(["wandb"]).log([1, 2, 3])
    assert warnings(capfd.readouterr().out) == [
        ("tracker-failed", "tracker wandb: ValueError: no luck; training continues"),
        ("tracker-incomplete", "wandb lacks 5 of 5 events; `sm-train review --export` has all"),
    ]


def test_a_tracker_whose_process_dies_is_one_warning(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_wandb(tmp_path, monkeypatch, "import os; os._exit(7)")
    job(["wandb"]).log(range(1, 50))
    [(code, message)] = warnings(capfd.readouterr().out)
    assert code == "tracker-incomplete"
    assert "its process ended with code 7" in message


def test_a_hanging_tracker_loses_events_and_blocks_nobody(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_wandb(tmp_path, monkeypatch, "import threading; threading.Event().wait()")
    made = job(["wandb"])
    stream = io.StringIO()
    events = EventLog(node=0, rank=0, stream=stream)
    feed = TrackerFeed("wandb", made.document, "256px", events, tmp_path / "node-event")
    line = "x" * 10_000
    # None of these calls may wait: nobody reads.
    done = threading.Event()

    def send() -> None:
        for _ in range(5000):
            feed.send(line)
        done.set()

    threading.Thread(target=send, daemon=True).start()
    assert done.wait(DEADLINE)
    feed.end()
    feed.finish(time.monotonic())
    [(_, ended), (_, dropped)] = warnings(stream.getvalue())
    assert "did not finish in 30 s and was ended" in ended
    assert "events were dropped: it was too slow" in dropped
    assert int(dropped.split()[2]) > 3000


def test_a_full_disk_leaves_readable_event_files(mount: Mount) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = mount("size=64k")
    (folder / "other").write_bytes(b"x" * 8192)
    files = TensorBoardFiles(folder / "run")
    files.create()

    def fill() -> None:
        for step in range(10_000):
            files.log_scalars(step, 1.0, {"train/loss": float(step)})

    with pytest.raises(OSError, match=_FULL):
        fill()
    with pytest.raises(OSError, match=_FULL):
        files.log_image(10_000, 1.0, b"x" * 100_000)
    (folder / "other").unlink()
    files.log_scalars(10_001, 1.0, {"l": 1.0})
    files.close("done")
    read = EventAccumulator(str(folder / "run")).Reload()
    steps = [scalar.step for scalar in read.Scalars("train/loss")]
    assert steps == list(range(len(steps)))
    assert len(steps) > 100
    assert [scalar.step for scalar in read.Scalars("l")] == [10_001]


@pytest.fixture
def heartbeats() -> Iterator[Path]:
    """The folder of this process's heartbeats."""
    folder = heartbeat_folder()
    create_private_folder(folder)
    yield folder
    shutil.rmtree(folder)


def test_the_nodes_metrics_are_added_at_the_last_step(job: Any, heartbeats: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fields = dict.fromkeys(FIELDS["node"]) | {"gpu_utilization_mean": 87.5}
    line = format_event("node", fields, time=1000.0, node=0, rank=0)
    keep = LastNodeEvent(node_event_file(heartbeats))
    keep("heartbeat", "another event")
    keep("node", line)
    made = job(["tensorboard"])
    made.log([1, 2, 3])
    [run] = (made.checkpoints / "trackers" / "tensorboard").iterdir()
    events = EventAccumulator(str(run)).Reload()
    [value] = events.Scalars("node 0/gpu_utilization_mean")
    assert (value.step, value.value, value.wall_time) == (0, 87.5, 1000.0)


def test_a_tracker_ends_after_its_training_process_was_killed() -> None:
    """Also while its client hangs, and with the processes that it has started."""
    tracker = """
import os, subprocess, sys
from sm_train.entrypoints.base.signals import kill_group_after_parent
kill_group_after_parent(int(sys.argv[1]), 0.0)
client = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print("started", flush=True)
client.wait()
"""
    training = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], str(os.getpid())], start_new_session=True)
"""
    command = [sys.executable, "-c", training, tracker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.kill()
        # The pipe closes when both have ended.
        closed, _, _ = select.select([process.stdout], [], [], DEADLINE)
        assert closed
        assert process.stdout.read() == ""


def test_other_ranks_start_no_tracker(
    job: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = job(["tensorboard"])
    monkeypatch.setenv("RANK", "1")
    made.log([1, 2])
    assert not (made.checkpoints / "trackers").exists()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from sm_train.entrypoints.job_interface.job_config import TrackerConfig
    from sm_train.entrypoints.tracking.packages import ensure_packages
    from sm_train.entrypoints.tracking.tracker import TrackerError

    # No interpreter of the tests lacks the packages.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrackerError, match="wandb is not installed; run pip install wandb"):
        ensure_packages(TrackerConfig("wandb"), tmp_path)

"""``submit --local`` trains the bundle as a job would, and leaves no process running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sm_train
import yaml
from sm_train.entrypoints.checkpoints.checkpoint_files import shard_files
from sm_train.entrypoints.job_interface.checkpoint_layout import shard_file_name
from sm_train.toolkit.records.job_logs import parse_event, read_events
from sm_train.toolkit.records.local_folder import LOCK_NAME
from sm_train.toolkit.submit.local.launcher import exclusive_run

from tests.conftest import Cli, clean_environment
from tests.support.cluster.training_jobs import write_shards
from tests.support.deadline import DEADLINE
from tests.toolkit.submit.local.submit_local_support import processes_of, write_tiny

pytestmark = pytest.mark.integration


def test_a_link_as_lock_does_not_empty_its_target(tmp_path: Path) -> None:
    """A repository with a local run in it may contain one."""
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_NAME).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), exclusive_run(tmp_path / "run"):
        pass
    assert precious.read_text() == "content"


MACOS = """
import os, pathlib, signal

for module, names in (
    (os, "posix_fallocate pidfd_open posix_fadvise sched_getaffinity memfd_create"),
    (signal, "sigwaitinfo sigtimedwait pidfd_send_signal"),
):
    for name in names.split():
        delattr(module, name)

def without_proc(method):
    def call(self, *arguments, **options):
        if self.parts[:2] == ("/", "proc"):
            if method.__name__ == "glob":
                return iter(())
            if method.__name__ in ("is_dir", "exists"):
                return False
            raise FileNotFoundError(str(self))
        return method(self, *arguments, **options)
    return call

for name in ("open", "is_dir", "exists", "glob"):
    setattr(pathlib.Path, name, without_proc(getattr(pathlib.Path, name)))
open(os.environ["EMULATED"], "a").write(f"{os.getpid()}\\n")
"""
"""Removes from every Python process what macOS does not have."""


@pytest.mark.slow
def test_local_run_trains_on_macos(tmp_path: Path) -> None:
    """Without /proc, a running rank is not taken for dead."""
    write_shards(tmp_path / "shards", shards=2, each=8)
    (tmp_path / "emulation").mkdir()
    (tmp_path / "emulation" / "sitecustomize.py").write_text(MACOS)
    run = write_tiny(tmp_path, max_steps=40, checkpoint_every=20)
    command = [sys.executable, "-m", "sm_train.toolkit", "submit", run, "--local", "--nodes", "1"]
    environment = clean_environment(tmp_path) | {
        "PYTHONPATH": f"{tmp_path / 'emulation'}:{os.environ.get('PYTHONPATH', '')}",
        "EMULATED": str(tmp_path / "emulated"),
    }
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len((tmp_path / "emulated").read_text().split()) >= 3, "not all processes are emulated"
    events = list(read_events(tmp_path / "local-runs" / "tiny" / "8px"))
    assert "rank-died" not in {event.get("code") for event in events}
    [end] = [event for event in events if event["kind"] == "end"]
    assert (end["reason"], end["step"]) == ("done", 40)


def test_user_code_runs_instead_of_ours(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=2, each=2)
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "a.png").write_bytes(b"")
    code = tmp_path / "code" / "jobs"
    code.mkdir(parents=True)
    (code / "helper.py").write_text("WORD = 'helped'\n")
    (code / "own.py").write_text(
        "import sys\n"
        "from helper import WORD\n"
        "from sm_train.entrypoints.job_interface.events import format_event\n"
        "from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths\n"
        "fields = {'code': 'c', 'message': 'the disk is slow'}\n"
        "print(format_event('warning', fields, time=1.0, node=0, rank=3), flush=True)\n"
        "paths = SageMakerPaths.from_environment()\n"
        "masks = [path.name for path in paths.channel('masks').iterdir()]\n"
        "(paths.checkpoints / 'seen').write_text(f'{WORD} {sys.argv[1:]} {masks}')\n"
    )
    run = write_tiny(tmp_path, max_steps=1)
    document = yaml.safe_load(run.read_text()) | {
        "code": "code",
        "entry": "jobs/own.py",
        "entry_args": ["--lr", "{learning_rate}"],
        "channels": {"masks": {"uri": "s3://own/masks/", "local": "masks"}},
    }
    run.write_text(yaml.safe_dump(document))
    result = cli("submit", run, "--local", "--nodes", "1", "--quiet", network="loopback")
    assert result.returncode == 0, result.stderr
    seen = tmp_path / "local-runs" / document["name"] / "8px" / "checkpoints" / "seen"
    assert seen.read_text() == "helped ['--lr', '0.001'] ['a.png']"
    assert "8px: done; jobs/own.py left no model" in result.stderr
    # --quiet hides messages, but no warning of any rank and no result.
    assert "warning (rank 3): the disk is slow\n" in result.stderr
    assert "emulating" not in result.stderr


def test_two_emulated_nodes_train_on_disjoint_shards(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=5, each=20)
    run = write_tiny(tmp_path, max_steps=4)
    result = cli(
        "submit",
        run,
        "--local",
        "--nodes",
        "2",
        "--output",
        "out",
        "--json",
        network="loopback",
    )
    assert result.returncode == 0, result.stderr
    root = tmp_path / "out" / "8px"
    [stage] = json.loads(result.stdout)["stages"]
    assert (Path(stage["model"]) / "model_index.json").exists()
    assigned = [
        {shard.name for shard in (node / "input/data/train").iterdir()}
        for node in sorted((root / "nodes").iterdir())
    ]
    assert [len(shards) for shards in assigned] == [3, 2]
    assert not assigned[0] & assigned[1]
    assert len(assigned[0] | assigned[1]) == 5
    start = next(event for event in read_events(root) if event["kind"] == "start")
    assert (start["world_size"], start["nodes"], start["backend"]) == (2, 2, "gloo")
    assert "step 4/4" in result.stderr
    assert "it/s" in result.stderr
    # Each node has a checkpoint folder of its own; "S3" has what both wrote.
    for rank, node in enumerate(sorted((root / "nodes").iterdir())):
        [shard] = (node / "checkpoints" / "step-00000004").glob("*.safetensors")
        assert shard.name == shard_file_name(rank)
    assert len(shard_files(root / "checkpoints" / "step-00000004")) == 2
    assert {path.suffix for path in (root / "checkpoints").rglob("*.sagemaker-*")} == set()
    config = root / "nodes" / "algo-2" / "input" / "config"
    assert json.loads((config / "resourceconfig.json").read_text())["current_host"] == "algo-2"
    assert json.loads((config / "hyperparameters.json").read_text()) == {"stage": "8px"}
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_stage_starts_from_the_previous_stages_model(cli: Cli, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", shards=1, each=20)
    run = write_tiny(tmp_path, max_steps=3)
    document = yaml.safe_load(run.read_text())
    document["stages"].append(document["stages"][0] | {"name": "second"})
    run.write_text(yaml.safe_dump(document))
    early = cli("submit", run, "--local", "--stage", "second", "--nodes", "1")
    assert early.returncode == 3
    assert "run that stage first" in early.stderr
    result = cli("submit", run, "--local", "--nodes", "1", network="loopback")
    assert result.returncode == 0, result.stderr
    second = tmp_path / "local-runs" / "tiny" / "second"
    previous = second / "nodes" / "algo-1" / "input" / "data" / "previous"
    assert (previous / "unet" / "diffusion_pytorch_model.safetensors").exists()


def press_ctrl_c(running: subprocess.Popen[str], job: sm_train.Job) -> None:
    running.send_signal(signal.SIGINT)


def stop(running: subprocess.Popen[str], job: sm_train.Job) -> None:
    assert job.status().state == "training"
    assert job.stop() == "Stopping"


@pytest.mark.parametrize("interrupt", [press_ctrl_c, pytest.param(stop, marks=pytest.mark.slow)])
def test_interrupt_ends_all_processes_after_a_checkpoint(
    tmp_path: Path, interrupt: Callable[[subprocess.Popen[str], sm_train.Job], None]
) -> None:
    write_shards(tmp_path / "shards", shards=2, each=20)
    run = write_tiny(tmp_path, max_steps=100000)
    program = "import sys\nfrom sm_train.toolkit.cli import main\nmain(sys.argv[1:])"
    running = subprocess.Popen(
        [sys.executable, "-c", program, "submit", str(run), "--local", "--nodes", "2"],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "step 3/" in line:
            break
    job = sm_train.Job(str(tmp_path / "local-runs" / "tiny"))
    interrupt(running, job)
    rest = running.stderr.read()
    assert running.wait(timeout=DEADLINE) == 130, rest
    assert "interrupted" in rest
    stopped = re.search(r"8px: stopped at step (\d+); checkpoint in \S+/step-0*(\d+)\n", rest)
    assert stopped is not None, rest
    assert stopped[1] == stopped[2]
    assert f"To resume: sm-train submit {run} --local --nodes 2\n" in rest
    assert processes_of(tmp_path) == []
    checkpoints = tmp_path / "local-runs" / "tiny" / "8px" / "checkpoints"
    assert [*checkpoints.glob("step-*/complete.json")]
    assert (job.wait(), job.stop(wait=True), job.status().state) == (
        "Stopped",
        "Stopped",
        "stopped",
    )


@pytest.mark.slow
def test_failed_job_prints_its_last_lines_and_failure_file(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.tar").write_bytes(b"this is no tar" * 100)
    run = write_tiny(tmp_path, max_steps=5)
    result = cli("submit", run, "--local", "--nodes", "2", network="loopback")
    assert result.returncode == 6
    assert "failed (exit 1); its last lines:" in result.stderr
    assert "failure file" in result.stderr
    assert "no readable sample" in result.stderr
    assert processes_of(tmp_path) == []


def test_local_run_needs_local_shards(cli: Cli, tmp_path: Path) -> None:
    run = write_tiny(tmp_path, max_steps=5)
    assert "no such folder" in cli("submit", run, "--local").stderr
    (tmp_path / "shards").mkdir()
    assert "holds no .tar" in cli("submit", run, "--local").stderr
    write_shards(tmp_path / "shards", shards=1, each=4)
    few = cli("submit", run, "--local", "--nodes", "2")
    assert few.returncode == 3
    assert "1 shards for 2 nodes" in few.stderr
    document = yaml.safe_load(run.read_text())
    del document["data"]["local"]
    run.write_text(yaml.safe_dump(document))
    unset = cli("submit", run, "--local")
    assert unset.returncode == 2
    assert "data.local: not set" in unset.stderr


def test_event_lines_are_parsed_among_other_output() -> None:
    line = 'rank 3: SMT {"kind": "heartbeat", "time": 1, "node": 0, "rank": 0, "step": 5, '
    line += '"seconds_since_step": 0.5}'
    event = parse_event(line)
    assert event is not None
    assert event["step"] == 5
    for text in ("", "SMT", "SMT {", line[:-9], 'SMT {"kind": "news"}', 'SMT {"kind": "step"}'):
        assert parse_event(text) is None

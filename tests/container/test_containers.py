"""The demo in two real containers, through the SDK's local mode: killed, stopped, resumed.

``engine.sh`` starts the engine; ``.ci/run`` sets REQUIRE_CONTAINERS, so that nothing is skipped.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sm_train.toolkit
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    parse_step_folder,
    shard_file_name,
    step_folders,
)
from sm_train.toolkit.demo.digits import write_digits
from sm_train.toolkit.records.job_logs import Event, read_events

from tests.conftest import Cli, clean_environment
from tests.container import containers_support
from tests.container.containers_support import docker
from tests.support.cluster.training_jobs import write_shards
from tests.support.deadline import DEADLINE
from tests.toolkit.submit.local.submit_local_support import write_tiny

engine = containers_support.engine

pytestmark = pytest.mark.integration

HOSTS = ("algo-1", "algo-2")


@contextmanager
def submitted(folder: Path, nodes: int) -> Iterator[subprocess.Popen[str]]:
    """Run ``submit --local container``; a failing test leaves no process running."""
    program = "import sys\nfrom sm_train.toolkit.cli import main\nmain(sys.argv[1:])"
    arguments = ["submit", "run.yaml", "--local", "container", "--output", "run"]
    running = subprocess.Popen(
        [sys.executable, "-c", program, *arguments, "--nodes", str(nodes)],
        cwd=folder,
        env=clean_environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.terminate()
        running.communicate(timeout=DEADLINE)


def wait_for(running: subprocess.Popen[str], pattern: str) -> None:
    assert running.stderr is not None
    output = []
    for line in running.stderr:
        output.append(line)
        if re.search(pattern, line):
            return
    raise AssertionError(f"{pattern!r} is not in the output:\n{''.join(output[-40:])}")


def wait_for_exit(running: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit code and remaining output; no container or network may be left."""
    output = running.communicate(timeout=2 * DEADLINE)[1]
    assert docker("ps", "-aq", "--filter", "label=com.docker.compose.project") == ""
    assert "sagemaker-local" not in docker("network", "ls")
    return running.returncode, output


def attempts(log: Path) -> list[list[Event]]:
    """Return a log's events, one list for each start."""
    started: list[list[Event]] = []
    for event in read_events(log):
        if event["kind"] == "start":
            started.append([])
        if started:
            started[-1].append(event)
    return started


def losses(events: list[Event]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def latest_step(stage: Path) -> int:
    """Return the step of the latest complete checkpoint."""
    [latest, *_] = [
        folder for folder in step_folders(stage / "checkpoints") if (folder / MARKER).exists()
    ]
    step = parse_step_folder(latest.name)
    assert step is not None
    return step


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_containers_train_the_demo_and_resume_exactly(
    cli: Cli, tmp_path: Path, engine: None, stopped: bool
) -> None:
    """Killed, then resumed to the end; or stopped once more, and finished by one container."""
    write_digits(tmp_path / "digits")
    assert cli("pack", "digits", "packed", "--shard-size", "240KB").returncode == 0
    preset = Path(sm_train.toolkit.__file__).parent / "presets" / "demo.yaml"
    text = preset.read_text()
    for default, replacement in [
        ("max_steps: 1000", "max_steps: 40"),
        ("warmup_steps: 50", "warmup_steps: 2"),
        ("per_device_batch_size: 32", "per_device_batch_size: 16"),
        ("effective_batch_size: 64", "effective_batch_size: 32"),
        ("log_every: 20", "log_every: 1"),
        ("every_steps: 250", "every_steps: 10"),
    ]:
        assert default in text
        text = text.replace(default, replacement)
    (tmp_path / "run.yaml").write_text(text)
    stage = tmp_path / "run" / "digits"

    (tmp_path / "outside.tar").write_bytes(b"")
    (tmp_path / "packed" / "shards" / "z.tar").symlink_to(tmp_path / "outside.tar")
    linked = cli("submit", "run.yaml", "--local", "container")
    assert linked.returncode == 2
    assert "z.tar: links to a file outside of" in linked.stderr
    (tmp_path / "packed" / "shards" / "z.tar").unlink()

    with submitted(tmp_path, nodes=2) as running:
        wait_for(running, "checkpoint at step 10$")
        wait_for(running, r"step \d+/40")
        # Other tests run containers with such names at the same time, without docker compose.
        container = docker(
            "ps", "-q", "--filter", "label=com.docker.compose.service=algo-2"
        ).strip()
        mounts = docker(
            "inspect", "-f", "{{range .Mounts}}{{.Destination}}={{.RW}} {{end}}", container
        )
        docker("kill", container)
        code, output = wait_for_exit(running)
    assert code == 6
    assert "algo-2 failed (exit 137)" in output
    for folder, writable in (("local_train", False), ("index", False), ("local_checkpoints", True)):
        assert f"/opt/ml/input/data/{folder}={str(writable).lower()}" in mounts.split()
    saved_step = latest_step(stage)
    # Each container wrote its own shard to its own folder; together they are the checkpoint.
    for rank, host in enumerate(HOSTS):
        own = {
            path.name for path in (stage / "node-checkpoints" / host).rglob("tensors-*.safetensors")
        }
        assert own == {shard_file_name(rank)}

    with submitted(tmp_path, nodes=2) as running:
        wait_for(running, r"step \d+/40")
        wait_for(running, r"step \d+/40")
        if stopped:
            running.send_signal(signal.SIGINT)
        code, output = wait_for_exit(running)
    assert code == (130 if stopped else 0), output
    stopped_at = latest_step(stage)

    shards = {path.name for path in (tmp_path / "packed" / "shards").glob("*.tar")}
    shares = [
        {path.name for path in (stage / "shares" / host / "train").iterdir()} for host in HOSTS
    ]
    assert shares[0] | shares[1] == shards
    assert not shares[0] & shares[1]

    if stopped:
        with submitted(tmp_path, nodes=1) as running:
            code, output = wait_for_exit(running)
        assert code == 0, output

    first, second, *third = attempts(stage)
    start = second[0]
    assert (start["world_size"], start["nodes"], start["backend"]) == (2, 2, "gloo")
    assert start["resumed_from_step"] == saved_step
    repeated = losses(first).keys() & losses(second).keys()
    assert repeated, "the run was killed before it trained past its checkpoint"
    for step in repeated:
        assert losses(second)[step] == pytest.approx(losses(first)[step], rel=1e-3)
    if stopped:
        # The stop wrote a checkpoint at the step that it interrupted.
        assert stopped_at >= max(losses(second))
        assert min(losses(third[0])) == stopped_at + 1
    assert max(losses((second, *third)[-1])) == 40
    assert (stage / "containers" / "model" / "model_index.json").exists()
    assert (stage / "checkpoints" / "final" / "model_index.json").exists()


def test_missing_docker_parts_are_one_line_errors(cli: Cli, tmp_path: Path, engine: None) -> None:
    write_shards(tmp_path / "shards", shards=2, each=4)
    run = write_tiny(tmp_path, max_steps=1)
    command = ["submit", run, "--local", "container"]
    no_engine = cli(*command, env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert no_engine.returncode == 3
    assert no_engine.stderr.strip() == (
        "sm-train: docker: the engine does not respond; start it, or use --local process"
    )
    bare = tmp_path / "bin"
    bare.mkdir()
    no_docker = cli(*command, env={"PATH": str(bare)})
    assert "docker: not installed; install it, or use --local process" in no_docker.stderr
    (bare / "docker").symlink_to(shutil.which("docker") or "")
    plugins = {"PATH": str(bare), "DOCKER_CONFIG": str(bare)}
    assert "docker compose: not installed" in cli(*command, env=plugins).stderr
    image = cli(*command, "--image", "none:such")
    assert (
        "--image: none:such: no such image on this machine; run docker build -t sm-train-local"
        in image.stderr
    )

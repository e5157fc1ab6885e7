"""Scripts that know nothing of sm-train: steps, checkpoints, resume and stop without a change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate.test_utils.scripts as accelerate_scripts
import pytest
import torch
from sm_train.entrypoints.job_interface.checkpoint_layout import MARKER, CheckpointMarker
from sm_train.entrypoints.script import saved_states
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.planning.measured_speeds import measure_speed
from sm_train.toolkit.records.checkpoints import local_checkpoints
from sm_train.toolkit.records.job_logs import parse_event

from tests.support.cluster.training_jobs import (
    Job,
    create_nodes,
    run_nodes,
    start_nodes,
    tiny_run,
)
from tests.support.deadline import DEADLINE
from tests.support.entry_scripts import train_like_diffusers

pytestmark = pytest.mark.integration

ARGUMENTS = (
    "--train_data_dir",
    "{channel.train}",
    "--output_dir",
    "{checkpoints}",
    "--max_train_steps",
    "{max_steps}",
    "--gradient_accumulation_steps",
    "{gradient_accumulation_steps}",
)
RESUMES = (*ARGUMENTS, "--resume_from_checkpoint", "{resume}")


def script_run(arguments: tuple[str, ...], **settings: Any) -> RunConfig:
    config = tiny_run(**({"max_steps": 20, "gradient_accumulation_steps": 2} | settings))
    # Without a preset: what the script trains is unknown.
    changes = {"code": ".", "entry": "train_like.py", "entry_args": arguments, "model": {}}
    return RunConfig.model_validate(config.model_dump(mode="json") | changes)


def script_code(path: str = train_like_diffusers.__file__) -> UserCode:
    return UserCode({"train_like.py": Path(path).read_bytes()})


def script_nodes(folder: Path, config: RunConfig, count: int) -> list[Job]:
    """Return nodes that all see the same 80 files, as in a fully replicated channel."""
    jobs = create_nodes(folder, config, count, script_code())
    for job in jobs:
        job.train_channel.mkdir(parents=True)
        for number in range(80):
            text = " ".join(str((number * 7 + column * 3) % 11 / 10) for column in range(4))
            (job.train_channel / f"{number:03d}.txt").write_text(text)
    return jobs


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def weights(job: Job) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(job.checkpoints / "weights.pt")
    return loaded


def assert_equal_weights(first: Job, second: Job) -> None:
    expected, actual = weights(first), weights(second)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[dict[str, Any]]]:
    """A run on two nodes from start to end, with its events."""
    nodes = script_nodes(tmp_path_factory.mktemp("whole"), script_run(RESUMES), 2)
    return nodes[0], run_nodes(nodes, 1)


@pytest.mark.slow
def test_unchanged_script_reports_like_the_built_in_training(
    uninterrupted: tuple[Job, list[dict[str, Any]]],
) -> None:
    job, events = uninterrupted
    [start] = of_kind(events, "start")
    assert (start["world_size"], start["nodes"], start["backend"]) == (2, 2, "gloo")
    # A batch of 4 per rank, and two micro-batches for each step.
    assert (start["per_device_batch_size"], start["effective_batch_size"]) == (4, 16)
    assert start["parameters"] == 4 * 8 + 8 + 8 + 1
    steps = of_kind(events, "step")
    # Only synchronized steps count: the script has 80 / 2 / 4 = 10 batches and 5 steps an epoch.
    assert [event["step"] for event in steps] == list(range(1, 21))
    assert [event["epoch"] for event in steps][::5] == [0, 1, 2, 3]
    assert all(event["loss"] > 0 and event["gradient_norm"] > 0 for event in steps)
    assert steps[0]["learning_rate"] > steps[-1]["learning_rate"]
    assert all(event["steps_per_second"] > 0 for event in steps)
    assert all(0 <= event["data_wait_share"] <= 1 for event in steps)
    [end] = of_kind(events, "end")
    assert (end["step"], end["reason"], end["images"]) == (20, "done", 20 * 16)
    assert [event["step"] for event in of_kind(events, "checkpoint")] == [5, 10, 15, 20]
    assert measure_speed(events, "log").measurement.effective_batch_size == 16
    stored = local_checkpoints(job.checkpoints)
    assert (stored.step, stored.name, stored.final) == (20, "checkpoint-20", True)
    # Only the main process saves, so no other rank's random state is part of it.
    marker = CheckpointMarker.parse((job.checkpoints / "checkpoint-20" / MARKER).read_bytes())
    names = {file.name for file in marker.files}
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl"} <= names
    assert "random_states_1.pkl" not in names


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("scheme", "saved"),
    [
        ("automatic", [f"checkpoints/checkpoint_{number}" for number in range(4)]),
        ("step_%(step)d", ["step_5", "step_10", "step_15", "step_20"]),
        ("epochs/epoch_%(epoch)d", [f"epochs/epoch_{number}" for number in range(4)]),
        ("last", ["last"]),
    ],
)
def test_every_naming_of_checkpoints_is_left_as_it_is(
    tmp_path: Path, scheme: str, saved: list[str], nodes: int
) -> None:
    """Accelerate refuses to save to a numbered folder that exists, and counts the others."""
    arguments = (*ARGUMENTS, "--save_on_all", "--checkpoint_name", scheme)
    # Five steps an epoch on one node as on two.
    config = script_run(arguments, gradient_accumulation_steps=4 // nodes)
    started = script_nodes(tmp_path, config, nodes)
    events = run_nodes(started, 1)
    reported = [event["step"] for event in of_kind(events, "checkpoint")]
    # A folder that is written again may have been overwritten before it was complete.
    assert reported == [5, 10, 15, 20] or (scheme == "last" and reported[-1] == 20)
    for node in started:
        states = {path.parent for path in node.checkpoints.rglob("random_states_*.pkl")}
        names = [folder.relative_to(node.checkpoints).as_posix() for folder in states]
        assert sorted(names) == sorted(saved)
        assert not (node.checkpoints / saved_states.UNFINISHED).exists()
    stored = local_checkpoints(started[0].checkpoints)
    assert (stored.step, stored.name) == (20, saved[-1])


def test_limit_of_automatically_named_checkpoints_is_kept(tmp_path: Path) -> None:
    arguments = (*ARGUMENTS, "--save_on_all", "--checkpoint_name", "automatic")
    arguments += ("--checkpoints_total_limit", "2")
    [node] = script_nodes(tmp_path, script_run(arguments), 1)
    run_nodes([node], 1)
    folders = sorted(path.name for path in (node.checkpoints / "checkpoints").iterdir())
    assert folders == ["checkpoint_2", "checkpoint_3"]


def test_killed_script_resumes_from_the_newest_complete_checkpoint(
    uninterrupted: tuple[Job, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """All ranks save here, so each restores its own random state: the end is bit for bit."""
    arguments = (*RESUMES, "--save_on_all")
    whole = script_nodes(tmp_path / "whole", script_run(arguments), 2)
    run_nodes(whole, 1)
    nodes = script_nodes(tmp_path / "killed", script_run(arguments), 2)
    with start_nodes(nodes, 1) as running:
        running[0].wait_for("checkpoint", step=10)
        for node in running:
            for pid in node.workers():
                os.kill(pid, signal.SIGKILL)
    stored = local_checkpoints(nodes[0].checkpoints)
    assert stored.step is not None
    # What a save that was cut short leaves; `latest` would choose it.
    partial = nodes[0].checkpoints / "checkpoint-19"
    partial.mkdir()
    (partial / "optimizer.bin").write_bytes(b"cut")
    events = run_nodes(nodes, 1)
    [start] = of_kind(events, "start")
    assert start["resumed_from_step"] == stored.step >= 10
    assert not partial.exists()
    assert "checkpoint-incomplete" in {event.get("code") for event in events}
    assert of_kind(events, "step")[0]["step"] == stored.step + 1
    marker = CheckpointMarker.parse((nodes[0].checkpoints / "checkpoint-20" / MARKER).read_bytes())
    # Each node holds its own rank's random state; the marker lists both.
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= {file.name for file in marker.files}
    assert_equal_weights(whole[0], nodes[0])


def test_stop_saves_a_checkpoint_that_the_script_resumes_from(tmp_path: Path) -> None:
    arguments = (*RESUMES, "--checkpointing_steps", "1000000")
    config = script_run(arguments, max_steps=10**6)
    nodes = script_nodes(tmp_path, config, 2)
    with start_nodes(nodes, 1) as running:
        running[0].wait_for("step", step=3)
        # On one node only, as for a spot interruption.
        (nodes[1].base / "stop-requested").touch()
        end = running[0].wait_for("end")
        assert end["reason"] == "sigterm"
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda node: "".join(node.lines()), running))
        assert [node.process.wait(timeout=DEADLINE) for node in running] == [0, 0]
    stored = local_checkpoints(nodes[0].checkpoints)
    assert (stored.step, stored.name) == (end["step"], f"checkpoint-{end['step']}")
    assert not stored.final
    (nodes[1].base / "stop-requested").unlink()
    with start_nodes(nodes, 1) as running:
        assert running[0].wait_for("start")["resumed_from_step"] == end["step"]
        assert running[0].wait_for("step")["step"] == end["step"] + 1


def test_hanging_script_is_found_and_killed(tmp_path: Path) -> None:
    """One rank stops in a batch; the watchdog kills both, as for the built-in training."""
    script = Path(train_like_diffusers.__file__).read_text()
    hang = "if global_step == 60: import time; time.sleep(10000)"
    line = "            with accelerator.accumulate(network):\n"
    code = script.replace(line, f"            {hang}\n{line}")
    assert code != script
    config = script_run(ARGUMENTS, max_steps=1000)
    document = config.model_dump(mode="json")
    document["heartbeat"] |= {"min_timeout": 2, "max_timeout": 60, "interval": 1}
    job = script_nodes(tmp_path, RunConfig.model_validate(document), 1)[0]
    (job.bundle / "train_like.py").write_text(code)
    with job.start() as running:
        stall = running.wait_for("warning", code="stall")
        assert (stall["phase"], stall["step"]) == ("step", 60)
        list(running.lines())
        assert running.process.wait(timeout=DEADLINE) != 0
    assert "no heartbeat for" in job.failure


def test_plain_script_gets_its_arguments_a_heartbeat_and_a_failure_report(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "print('got', sys.argv[1:], __name__, flush=True)\n"
        "while not pathlib.Path('seen').exists():\n"
        "    time.sleep(0.05)\n"
        "raise ValueError('no such column')\n"
    )
    arguments = ("--out={model}", "--resume", "{resume}", "{{stage}}", '{"a": {}}', "{stage}")
    document = script_run(arguments).model_dump(mode="json")
    document["heartbeat"] |= {"interval": 1}
    files = UserCode({"train_like.py": code.encode()})
    job = Job(tmp_path, RunConfig.model_validate(document), None, files)
    lines: list[str] = []
    with job.start() as running:
        for line in running.lines():
            lines.append(line)
            if (event := parse_event(line)) and event["kind"] == "heartbeat":
                (job.bundle / "seen").touch()
        assert running.process.wait(timeout=DEADLINE) == 1
    expected = [f"--out={tmp_path / 'model'}", "{stage}", '{"a": {}}', "8px"]
    assert f"got {expected} __main__\n" in lines
    [error] = of_kind([event for line in lines if (event := parse_event(line))], "error")
    assert error["message"] == "ValueError: no such column"
    assert "ValueError: no such column" in job.failure


BUSY_AT_THE_END = """
import time

import torch
from accelerate import Accelerator

accelerator = Accelerator()
network = accelerator.prepare(torch.nn.Linear(2, 1))
network(torch.ones(4, 2)).sum().backward()
time.sleep(accelerator.process_index)
work = torch.distributed.all_reduce(torch.ones(1), async_op=True)
# On rank 0 it runs in Gloo's thread, a second later.
work.get_future().then(lambda future: print(future))
del work
accelerator.end_training()
"""


def test_script_ends_while_a_thread_of_gloo_needs_the_gil(tmp_path: Path) -> None:
    """DDP's reducer joins the thread with the GIL held when the model is freed."""
    code = UserCode({"train_like.py": BUSY_AT_THE_END.encode()})
    [job] = create_nodes(tmp_path, script_run((), max_steps=1), 1, code)
    job.train_channel.mkdir(parents=True)
    [end] = of_kind(run_nodes([job], 2), "end")
    assert end["reason"] == "done"


FRESH_IMPORT = """
import sys

from sm_train.entrypoints.script.hooks import observe_accelerate


class Observer:
    def created(self, accelerator):
        print("observed", flush=True)


observe_accelerate(Observer())
assert "accelerate" not in sys.modules
from accelerate import Accelerator

Accelerator(cpu=True)
"""


def test_the_scripts_own_import_of_accelerate_is_observed() -> None:
    """In a new interpreter, as in a job: processes of the other tests have imported it before."""
    command = [sys.executable, "-c", FRESH_IMPORT]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout == "observed\n"


TWO_NETWORKS = """
import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator()
loader = torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=4)
networks = [torch.nn.Linear(4, 1) for _ in range(3)]
first, second, later = (torch.optim.SGD(one.parameters(), 0.01) for one in networks)
first, second, loader = accelerator.prepare(first, second, loader)
for number, batch in enumerate(loader, 1):
    for network, optimizer, times in zip(networks, (first, second), (1, 3)):
        for _ in range(times):
            network(batch).square().mean().backward()
            optimizer.step()
    if number % 10 == 0:
        accelerator.save_state(f"{sys.argv[1]}/checkpoint-{number}")
accelerator.free_memory()
later = accelerator.prepare(later)
for _ in range(5):
    later.step()
"""


def test_steps_of_one_of_several_optimizers_count(tmp_path: Path) -> None:
    """The second one takes three steps for each of the first; the last one replaces both."""
    code = UserCode({"train_like.py": TWO_NETWORKS.encode()})
    [job] = create_nodes(tmp_path, script_run(("{checkpoints}",), max_steps=25), 1, code)
    job.train_channel.mkdir(parents=True)
    events = run_nodes([job], 1)
    assert [event["step"] for event in of_kind(events, "step")] == list(range(1, 26))
    assert [event["step"] for event in of_kind(events, "checkpoint")] == [10, 20]
    warned = {event["code"]: event["message"] for event in of_kind(events, "warning")}
    assert "the steps of one of its optimizers count" in warned["entry-several-optimizers"]
    assert "loss: the script did not call Accelerator.backward" in str(events)


@pytest.mark.parametrize(
    ("name", "num_nodes"),
    [
        ("test_sync.py", 2),
        # It writes a file that all processes must share, so they are on one node.
        pytest.param("test_script.py", 1, marks=pytest.mark.slow),
        pytest.param("test_ops.py", 2, marks=pytest.mark.slow),
    ],
)
def test_scripts_of_accelerate_itself_run_unchanged(
    tmp_path: Path, name: str, num_nodes: int
) -> None:
    """Without test_distributed_data_loop.py: it hangs at uneven inputs on CPUs without us, too."""
    script = Path(accelerate_scripts.__path__[0]) / name
    config = script_run(())
    nodes = create_nodes(tmp_path, config, num_nodes, script_code(str(script)))
    events = run_nodes(nodes, 2 // num_nodes)
    [end] = of_kind(events, "end")
    assert end["reason"] == "done"
    warned = {event["code"] for event in of_kind(events, "warning")}
    assert bool(of_kind(events, "step")) != ("entry-no-steps" in warned)

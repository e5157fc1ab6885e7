"""Ctrl-C in long commands at any moment, sent to the whole process group as a terminal does.

No process and no partial file is left, and the same command then completes with the same result.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.cluster.training_jobs import write_shards
from tests.support.deadline import DEADLINE
from tests.support.image_files import read_tree, write_album
from tests.support.job_log_lines import SimulatedJob
from tests.toolkit.commands.interrupts_support import (
    ENDING_SIGNALS,
    FEW,
    MANY,
    Finished,
    LongCommand,
    complete,
    files,
    interrupt,
    interrupt_in_a_row,
    interrupt_repeatedly,
    started,
    write_run,
)

pytestmark = pytest.mark.integration


DEMO = (
    "import signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from sm_train.toolkit.demo.__main__ import main\n"
    "main(sys.argv[1:])\n"
)


def packed(folder: Path) -> dict[str, bytes]:
    """Return the shards and their index, without the packer's own state."""
    tree = read_tree(folder / "out")
    return {name: content for name, content in tree.items() if not name.startswith(".packing")}


def trained(folder: Path) -> dict[str, bytes]:
    """Return the weights of the final model."""
    [model] = folder.glob("local-runs/*/*/nodes/algo-1/model")
    return {
        path.relative_to(model).as_posix(): path.read_bytes()
        for path in model.rglob("*.safetensors")
    }


def write_trained(folder: Path) -> None:
    write_run(folder)
    (folder / "prompts.txt").write_text("a 3\n")
    complete(COMMANDS["train"], folder)


CHECKPOINTS = "local-runs/tiny/8px/checkpoints"

COMMANDS = {
    "pack": LongCommand(
        ("pack", "in", "out", "--shard-size", "60KB", "--workers", "2"),
        lambda folder: write_album(folder / "in", 60),
        packed,
    ),
    "train": LongCommand(("submit", "run.yaml", "--local", "--nodes", "2"), write_run, trained),
    "index": LongCommand(
        ("index", "shards"),
        lambda folder: write_shards(folder / "shards", shards=4, each=200),
        files("index.parquet"),
        atomic=True,
    ),
    "sample": LongCommand(
        ("sample", CHECKPOINTS, "--prompts", "prompts.txt", "--steps", "20"),
        write_trained,
        files("grid.png"),
        atomic=True,
    ),
    "export": LongCommand(("export", CHECKPOINTS, "out"), write_trained, files("out"), atomic=True),
    "review": LongCommand(
        ("review", "local-runs/tiny/8px", "--html", "review.html"),
        write_trained,
        lambda folder: dict.fromkeys(files("review.html")(folder), b""),
        atomic=True,
    ),
}


def write_checkpoints(folder: Path) -> None:
    from tests.support.models import build, write_checkpoint

    write_checkpoint(build("tiny-sd2"), folder / "checkpoints")
    (folder / "prompts.txt").write_text("a 3\n")


def write_log(folder: Path) -> None:
    lines = [text for _, text in SimulatedJob(nodes=1, intervals=60).lines()]
    (folder / "algo-1.log").write_text("\n".join(lines))


QUICK = {
    "index": COMMANDS["index"],
    "sample": LongCommand(
        ("sample", "checkpoints", "--prompts", "prompts.txt", "--steps", "4"),
        write_checkpoints,
        files("grid.png"),
        atomic=True,
        forked=True,
    ),
    "export": LongCommand(
        ("export", "checkpoints", "out"), write_checkpoints, files("out"), atomic=True, forked=True
    ),
    "review": LongCommand(
        ("review", "algo-1.log", "--html", "review.html"),
        write_log,
        lambda folder: dict.fromkeys(files("review.html")(folder), b""),
        atomic=True,
    ),
}
"""Commands as in :data:`COMMANDS`, whose inputs take no training."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("pack", FEW),
        pytest.param("pack", MANY, marks=pytest.mark.slow),
        pytest.param("train", FEW, marks=pytest.mark.slow),
        pytest.param("train", MANY, marks=pytest.mark.slow),
        pytest.param("index", MANY, marks=pytest.mark.slow),
        pytest.param("sample", MANY, marks=pytest.mark.slow),
        pytest.param("export", MANY, marks=pytest.mark.slow),
        pytest.param("review", MANY, marks=pytest.mark.slow),
    ],
)
def test_interrupted_command_leaves_nothing_and_resumes(
    tmp_path: Path, name: str, times: int
) -> None:
    interrupt_repeatedly(COMMANDS[name], tmp_path, times)


SLOW_FUNCTION = """
import time

def wait(batch):
    time.sleep(0.02)
    return {"seen": [True] * len(batch)}
"""

WITH_WORKERS = {
    "pack": ("pack", "in", "out", "--shard-size", "20KB", "--workers", "2"),
    "enrich": (
        *("enrich", "in", "out", "--with", "slow:wait", "--batch-size", "1", "--workers", "2"),
    ),
}


@pytest.mark.parametrize("name", WITH_WORKERS)
@pytest.mark.parametrize("number", ENDING_SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("receiver", ["group", "command", "worker"])
def test_signal_decides_the_exit_code_whoever_receives_it(
    tmp_path: Path, name: str, number: signal.Signals, receiver: str
) -> None:
    write_album(tmp_path / "in", 300)
    (tmp_path / "slow.py").write_text(SLOW_FUNCTION)
    command = LongCommand(WITH_WORKERS[name], lambda folder: None, files("out"))
    with started(command, tmp_path) as process:
        workers: list[psutil.Process] = []
        while not any(each.num_threads() > 1 for each in workers):
            assert process.poll() is None
            children = psutil.Process(process.pid).children()
            workers = [child for child in children if "spawn_main" in f"{child.cmdline()}"]
            time.sleep(0.02)
        time.sleep(0.3)
        if receiver == "group":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if receiver == "command" else workers[-1].pid, number)
        _, stderr = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + number, stderr
    assert ("terminated" if number == signal.SIGTERM else "interrupted") in stderr
    assert "memory" not in stderr
    assert "Traceback" not in stderr
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("name", QUICK)
def test_command_that_is_interrupted_three_times_completes(tmp_path: Path, name: str) -> None:
    interrupt_in_a_row(Finished.of(QUICK[name], tmp_path), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("times", [FEW, MANY])
def test_interrupted_demo_leaves_no_process_and_starts_over(tmp_path: Path, times: int) -> None:
    steps = ("--set", "stages.digits.max_steps=20", "--set", "checkpoint.every_steps=20")
    result = files("demo-out/packed/index.parquet", "demo-out/demo.png")
    command = LongCommand(steps, lambda folder: None, result, program=DEMO)
    finished = Finished.of(command, tmp_path)
    for delay in finished.delays(times, seed=times):
        interrupt(command, tmp_path / "reference", delay)
    complete(command, tmp_path / "reference")
    assert len(command.result(tmp_path / "reference")) == 2


@pytest.mark.parametrize(
    "error",
    [
        'AttributeError("partially initialized module")',
        'UserError("model.safetensors: cannot be read")',
        'OSError(5, "Input/output error", "a.parquet")',
    ],
)
def test_interrupt_that_a_library_drops_is_no_other_error(tmp_path: Path, error: str) -> None:
    program = f"""
import os, signal
from sm_train.toolkit import cli
from sm_train.toolkit.base.errors import UserError

def main(**_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise {error} from None

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.cli.main = main
cli.main(["list"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "sm-train: interrupted\n")


def test_interrupt_that_python_drops_is_repeated(tmp_path: Path) -> None:
    """An exception in a finalizer or a callback is printed and dropped."""
    program = """
import os, signal, time
from sm_train.toolkit import cli

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def main(**_):
    Dropping()
    time.sleep(3600)

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.cli.main = main
cli.main(["list"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stderr) == (130, "sm-train: interrupted\n")


@pytest.mark.slow
def test_second_local_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """It would replace the folders in which the first one is training."""
    write_run(tmp_path, max_steps=100_000)  # it trains until the test ends
    command = COMMANDS["train"]
    with started(command, tmp_path) as first:
        assert first.stderr is not None
        for line in first.stderr:
            if "step " in line:
                break
        with started(command, tmp_path) as second:
            _, stderr = second.communicate(timeout=DEADLINE)
        assert second.returncode == 2
        assert "another local run is using this folder; wait for it, or pass --output" in stderr


def test_interrupt_after_the_output_is_complete_is_ignored(tmp_path: Path) -> None:
    """The same command would otherwise refuse to replace the output of an interrupted one."""
    program = """
import os, signal
from sm_train.toolkit import cli
from sm_train.toolkit.terminal.interrupts import set_complete

def main(**_):
    set_complete(True)
    os.kill(os.getpid(), signal.SIGINT)
    print("wrote out")

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.cli.main = main
cli.main(["list"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote out\n", "")


DROPPED = """
import os, signal
from sm_train.entrypoints.base.signals import raise_on_signals
from sm_train.toolkit import cli

def import_half(**_):
    with raise_on_signals():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise AttributeError("partially initialized module") from None

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.cli.main = import_half
cli.main([])
"""


def test_interrupt_that_an_import_replaced_by_its_error_is_one() -> None:
    result = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "sm-train: interrupted\n")


IMPORTING = """
import signal, time
from sm_train.toolkit import cli

def main(**_):
    import library
    time.sleep(3600)

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.cli.main = main
cli.main(["list"])
"""
LIBRARY = """
import os, signal, sys, time
for _ in range({interrupts}):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
print("imported", file=sys.stderr)
"""


@pytest.mark.parametrize(("interrupts", "output"), [(1, "imported\n"), (2, "")])
def test_interrupt_during_an_import_waits_for_its_end(
    tmp_path: Path, interrupts: int, output: str
) -> None:
    """An exception in the import of a compiled module may abort the process; a second one may."""
    (tmp_path / "library.py").write_text(LIBRARY.format(interrupts=interrupts))
    (tmp_path / "program.py").write_text(IMPORTING)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stderr) == (130, f"{output}sm-train: interrupted\n")

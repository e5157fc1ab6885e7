"""Checkpoints: a marker is written last and removed first, and a kill leaves a complete one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.sharded_tensors import load_full

from tests.conftest import clean_environment
from tests.support.order.traced import Call, Program, not_durable, read_trace

ROOT = Path(__file__).parents[2]

STEPS = (10, 20, 30, 40)

TRAINING = """
import sys
from pathlib import Path
from tests.entrypoints.checkpoints.test_async_checkpointer import Training

training = Training(Path("checkpoints"), keep=1)
for step in map(int, sys.argv[1:]):
    training.save(step)
"""


def train(folder: Path, trace: Path, kill_at: int = 0) -> list[Call]:
    """Save a checkpoint at each step, and keep few; return the calls."""
    environment = clean_environment(folder) | {"PYTHONPATH": str(ROOT)}
    program = Program(folder, environment, list(map(str, STEPS)), TRAINING)
    done = program.run(trace, kill_at)
    assert done.returncode in ((0, -9) if kill_at else (0,)), done.stderr
    return [call for call in read_trace(trace) if "/checkpoints" in call.path]


@pytest.fixture(name="calls", scope="module")
def _calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    return train(tmp_path_factory.mktemp("training"), tmp_path_factory.mktemp("trace") / "calls")


@pytest.mark.integration
def test_content_is_flushed_before_its_name_and_a_marker_is_named_last(calls: list[Call]) -> None:
    kept = [call for call in calls if call.kind == "flush" or not call.name.startswith(".")]
    assert [*not_durable([call for call in kept if call.kind != "remove"])] == []
    for folder in {call.folder for call in calls if call.kind == "name"}:
        named = [call.name for call in calls if call.kind == "name" and call.folder == folder]
        visible = [name for name in named if not name.startswith(".")]
        assert visible[-1] == checkpoint_files.MARKER, visible
        if Path(folder).exists():  # nothing was written under its final name
            stored = {path.name for path in Path(folder).iterdir()}
            assert {name for name in stored if not name.startswith(".")} <= {*visible}


@pytest.mark.integration
def test_the_name_of_a_checkpoints_folder_is_flushed_before_its_marker(calls: list[Call]) -> None:
    flushes = [
        number
        for number, call in enumerate(calls)
        if call.kind == "flush" and call.name == "checkpoints"
    ]
    named = [
        number
        for number, call in enumerate(calls)
        if call.kind == "name" and call.name == checkpoint_files.MARKER
    ]
    assert len(named) == len(STEPS)
    for before, marker in zip([-1, *named], named, strict=False):
        assert any(before < number < marker for number in flushes)


@pytest.mark.integration
def test_a_marker_is_removed_before_any_file_of_its_checkpoint(calls: list[Call]) -> None:
    removed = 0
    for number, call in enumerate(calls):
        if call.kind == "name" and call.source and "/.checkpoint" not in call.source:
            taken = Path(call.source)
        elif call.kind == "remove":
            taken = Path(call.path)
        else:
            continue
        if taken.name.startswith(".") or taken.name == checkpoint_files.MARKER:
            continue
        if not taken.parent.name.startswith("step-"):
            continue
        marker = str(taken.with_name(checkpoint_files.MARKER))
        before = [(each.kind, each.path) for each in calls[:number]]
        # A marker that was named is removed before this file, and not written again.
        if ("name", marker) in before:
            last = max(index for index, each in enumerate(before) if each[1] == marker)
            assert before[last][0] == "remove", call
            removed += 1
    assert removed >= len(STEPS) - 2


def newest(folder: Path) -> int | None:
    """Return the step of the checkpoint from which a job would resume; its content must fit."""
    found = checkpoint_files.latest_complete(folder / "checkpoints", lambda path, reason: None)
    if found is None:
        return None
    [tensor] = load_full(checkpoint_files.shard_files(found.folder), "").values()
    assert tensor.unique().tolist() == [float(found.step)]
    return found.step


def require_recovery(numbers: list[int], folder: Path) -> None:
    """Require that a kill before each of these calls leaves the checkpoint last called complete."""
    for number in numbers:
        place = folder / str(number)
        place.mkdir()
        trace = folder / "trace"
        train(place, trace, number)
        made = read_trace(trace)
        named = [
            call.folder
            for call in made
            if call.name == checkpoint_files.MARKER and call.kind == "name"
        ]
        expected = int(named[-1].rpartition("-")[2]) if named else None
        # The call that names the marker may be the one that was not made.
        assert newest(place) == expected, (number, made[-1])
        shutil.rmtree(place)


@pytest.mark.integration
def test_a_kill_at_some_calls_leaves_a_complete_checkpoint(
    calls: list[Call], tmp_path: Path
) -> None:
    require_recovery(random.Random(1).sample(range(len(calls) // 2, len(calls) + 1), 3), tmp_path)


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_a_complete_checkpoint(calls: list[Call], tmp_path: Path) -> None:
    require_recovery(list(range(1, len(calls) + 1)), tmp_path)

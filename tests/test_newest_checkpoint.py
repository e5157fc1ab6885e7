"""Which checkpoint is the newest complete one: every part of the product has the same answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.checkpoints.checkpoint_files import latest_complete
from sm_train.entrypoints.clusters.checkpoint_restore import newest_stored_step, restore
from sm_train.entrypoints.clusters.prefix_copy import PrefixFiles
from sm_train.entrypoints.clusters.watcher import _newest_checkpoint
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    CheckpointFile,
    CheckpointMarker,
    newest_listed,
    parse_step_folder,
    step_folder_name,
)
from sm_train.entrypoints.script.saved_states import complete_states
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.entrypoints.storage.store import store_of
from sm_train.toolkit.checks.checkpoints import latest_checkpoint
from sm_train.toolkit.records.checkpoints import local_checkpoints, stored_checkpoints

from tests.conftest import Aws
from tests.support.moto_server import aws_session

FILES = ("model-0.safetensors", "optimizer/0.bin")


def write_checkpoint(
    folder: Path, name: str, step: int, *, lost: str = "", short: str = "", marked: bool = True
) -> None:
    """Write a checkpoint; one of its files may be lost or cut short."""
    content = f"weights of {step}".encode() * 100
    files = tuple(CheckpointFile(file, len(content), blake3(content).hexdigest()) for file in FILES)
    for file in FILES:
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file != lost:
            path.write_bytes(content[:-1] if file == short else content)
    if marked:
        marker = CheckpointMarker(step, 1, "x", files, "kubernetes")
        (folder / name / MARKER).write_text(marker.to_json())


def step(number: int) -> str:
    return step_folder_name(number)


def whole(folder: Path) -> None:
    write_checkpoint(folder, step(100), 100)
    write_checkpoint(folder, step(200), 200)


def file_lost(folder: Path) -> None:
    write_checkpoint(folder, step(100), 100)
    write_checkpoint(folder, step(200), 200, lost=FILES[1])


def file_short(folder: Path) -> None:
    write_checkpoint(folder, step(100), 100)
    write_checkpoint(folder, step(200), 200, short=FILES[0])


def unmarked(folder: Path) -> None:
    write_checkpoint(folder, step(100), 100)
    write_checkpoint(folder, step(200), 200, marked=False)


def nothing_whole(folder: Path) -> None:
    write_checkpoint(folder, step(100), 100, lost=FILES[0])


def own_names(folder: Path) -> None:
    write_checkpoint(folder, "checkpoint-900", 900)
    write_checkpoint(folder, "checkpoint-1000", 1000)


def own_names_file_lost(folder: Path) -> None:
    write_checkpoint(folder, "runs/epoch_9", 450)
    write_checkpoint(folder, "runs/epoch_10", 500, lost=FILES[0])
    write_checkpoint(folder, "best", 300)


def numbers_that_are_no_steps(folder: Path) -> None:
    write_checkpoint(folder, "best-0.50", 1000)
    write_checkpoint(folder, "best-0.35", 2000)
    write_checkpoint(folder, "best-0.60", 3000, lost=FILES[0])


def numbers_that_start_again(folder: Path) -> None:
    write_checkpoint(folder, "runs/checkpoint_9", 900)
    write_checkpoint(folder, "runs/checkpoint_0", 1000)


SITUATIONS = {
    numbers_that_are_no_steps: "best-0.35",
    numbers_that_start_again: "runs/checkpoint_0",
    whole: step(200),
    file_lost: step(100),
    file_short: step(100),
    unmarked: step(100),
    nothing_whole: None,
    own_names: "checkpoint-1000",
    own_names_file_lost: "runs/epoch_9",
}


@pytest.mark.parametrize(
    ("write", "expected"), SITUATIONS.items(), ids=[each.__name__ for each in SITUATIONS]
)
def test_every_part_says_the_same(
    write: object, expected: str | None, tmp_path: Path, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status and resume, check, alerts, the trainer, restore in pods, and a script's observer."""
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    folder = tmp_path / "checkpoints"
    write(folder)  # type: ignore[operator]
    aws.make_bucket("bucket")
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"run/{path.relative_to(folder).as_posix()}"
            aws.client("s3").upload_file(str(path), "bucket", key)
    markers = {
        path.parent: CheckpointMarker.parse(path.read_bytes()) for path in folder.rglob(MARKER)
    }
    step_of = None if expected is None else markers[folder / expected].step

    session, uri = aws_session(), "s3://bucket/run"
    assert local_checkpoints(folder).name == expected
    assert stored_checkpoints(session, uri, "us-east-1").name == expected
    checked = latest_checkpoint(store_of(session), uri)
    assert (checked and checked.step) == step_of
    assert _newest_checkpoint(LocalFolder(folder)) == expected
    assert newest_stored_step(PrefixFiles(f"{uri}/")) == step_of
    if expected is None or parse_step_folder(expected) is not None:
        for verify in (False, True):
            latest = latest_complete(folder, lambda *_: None, verify=verify)
            assert (latest and latest.step) == step_of
    restored = restore(PrefixFiles(f"{uri}/"), tmp_path / "pod", pytest.fail)
    assert (expected is None and not restored.checkpoints) or expected in restored.checkpoints
    states = complete_states(folder)
    assert (states[0].name if states else None) == expected


@given(
    st.dictionaries(st.integers(0, 10**8), st.sampled_from(["whole", "lost", "unmarked"])),
    st.sampled_from(["step-", "checkpoint-", "a/b_", ""]),
    st.randoms(use_true_random=False),
)
def test_newest_is_the_highest_whole_step_in_whatever_order_files_are_listed(
    states: dict[int, str], stem: str, shuffle: random.Random
) -> None:
    listed: list[tuple[str, int]] = []
    contents = {}
    for number, state in states.items():
        name = step_folder_name(number) if stem == "step-" else f"{stem}{number}"
        files = tuple(CheckpointFile(file, 10, "") for file in FILES)
        contents[name] = CheckpointMarker(number, 1, "", files).to_json().encode()
        listed += [(f"{name}/{file}", 10) for file in FILES[state == "lost" :]]
        listed += [] if state == "unmarked" else [(f"{name}/{MARKER}", len(contents[name]))]
    shuffle.shuffle(listed)
    found = newest_listed(dict(listed), contents.__getitem__)
    complete = [number for number, state in states.items() if state == "whole"]
    assert found.step == max(complete, default=None)

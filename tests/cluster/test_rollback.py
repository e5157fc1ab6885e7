"""Rollback and resume on several nodes, each with its own checkpoint folder, as on SageMaker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.job_interface.checkpoint_layout import (
    MARKER,
    SAMPLER_FILE,
    CheckpointMarker,
    shard_file_name,
    step_folder_name,
)
from sm_train.toolkit.submit.local.emulated_checkpoint_sync import (
    BetweenBlocks,
    CheckpointSync,
    NodeUploads,
)

from tests.support.cluster import diverging_train
from tests.support.cluster.training_jobs import (
    Job,
    create_nodes,
    losses,
    run_nodes,
    shard_digests,
    start_nodes,
    sync_nodes,
    tiny_run,
    write_shards,
)

SAVED, DIVERGED, STEPS = 5, 10, 14
"""The step that a rollback returns to, the one at which it happens, and the last one."""


@dataclass(frozen=True)
class Layout:
    """How the job is distributed."""

    nodes: int
    processes: int
    sharding: str = "none"

    @property
    def last_rank(self) -> int:
        return self.nodes * self.processes - 1

    def create(self, folder: Path) -> list[Job]:
        config = tiny_run(
            preset="tiny-mmdit",
            max_steps=STEPS,
            checkpoint_every=SAVED,
            per_device_batch_size=2,
            sharding=self.sharding,
            warmup_steps=20,
            max_nonfinite_steps=2,
            max_rollbacks=1,
        )
        nodes = create_nodes(folder, config, self.nodes)
        for number, node in enumerate(nodes):
            write_shards(node.train_channel, shards=self.nodes, each=8)
            for other in set(range(self.nodes)) - {number}:
                (node.train_channel / f"shard-{other:03d}.tar").unlink()
        return nodes


ALL_LAYOUTS = [
    Layout(2, 1),
    Layout(3, 1),
    Layout(2, 2),
    Layout(2, 1, "full_shard"),
    Layout(3, 1, "full_shard"),
    Layout(2, 1, "shard_grad_op"),
    Layout(2, 2, "hybrid_shard"),
]
LAYOUTS = [
    ALL_LAYOUTS[0],
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in ALL_LAYOUTS[1:]),
]


@dataclass(frozen=True)
class Undisturbed:
    """A run without a fault, and one that continues as a rolled-back run should.

    The second one starts from the state of the saved step and the data position of the diverged
    one: a rollback restores the state, but training continues with the next data.
    """

    prefix: Path
    losses: dict[int, float]
    digests: dict[str, str]
    continued_losses: dict[int, float]
    continued_digests: dict[str, str]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Undisturbed]:
    @cache
    def train(layout: Layout) -> Undisturbed:
        nodes = layout.create(tmp_path_factory.mktemp("undisturbed"))
        events = run_nodes(nodes, layout.processes)
        continued = layout.create(tmp_path_factory.mktemp("continued"))
        prefix = nodes[0].checkpoints
        copy_saved(prefix, continued[0].checkpoints, data_of=DIVERGED)
        continued_events = run_nodes(continued, layout.processes)
        return Undisturbed(
            prefix,
            losses(events),
            shard_digests(nodes[0], STEPS),
            losses(continued_events),
            shard_digests(continued[0], STEPS),
        )

    return train


def copy_saved(source: Path, target: Path, *, data_of: int) -> None:
    """Copy the saved step's checkpoint and the components, with the data position of a step."""
    ignored = shutil.ignore_patterns("final", *map(step_folder_name, (DIVERGED, STEPS)))
    shutil.copytree(source, target, ignore=ignored)
    folder = target / step_folder_name(SAVED)
    marker = CheckpointMarker.parse((folder / MARKER).read_bytes())
    data = (source / step_folder_name(data_of) / SAMPLER_FILE).read_bytes()
    written = checkpoint_files.write_file(folder, SAMPLER_FILE, checkpoint_files.save_bytes(data))
    files = [written if file.name == SAMPLER_FILE else file for file in marker.files]
    checkpoint_files.write_marker(folder, SAVED, marker.world_size, marker.fingerprint, files)


def diverge(layout: Layout, first: int, last: int, **variables: str) -> dict[str, Any]:
    """Options of a run whose loss is NaN on the last rank in these passes."""
    return {
        "script": diverging_train.__file__,
        "environment": {"DIVERGE": f"{layout.last_rank}:{first}:{last}", **variables},
    }


def warnings(events: list[dict[str, Any]], code: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("code") == code]


def after_rollback(events: list[dict[str, Any]]) -> dict[int, float]:
    """Return the losses of the steps after the rollback, on the rank that logs them."""
    logged = [event for event in events if event["rank"] == 0]
    [rollback] = [index for index, event in enumerate(logged) if event.get("code") == "rolled-back"]
    assert logged[rollback]["step"] == SAVED
    return losses(logged[rollback:])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rolled_back_training_equals_training_from_that_state(
    tmp_path: Path, undisturbed: Callable[[Layout], Undisturbed], layout: Layout
) -> None:
    """Bit for bit: every loss after it, and every tensor at the end.

    A rollback reads no file: the checkpoint folder of one node is lost before.
    """
    expected = undisturbed(layout)
    nodes = layout.create(tmp_path)
    faults = diverge(layout, DIVERGED - 2, DIVERGED, LOSE_FOLDER="1")
    events = run_nodes(nodes, layout.processes, **faults)
    assert after_rollback(events) == expected.continued_losses
    assert min(expected.continued_losses) == SAVED + 1
    assert shard_digests(nodes[0], STEPS) == expected.continued_digests


@pytest.mark.slow
@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=str)
def test_resumed_job_rolls_back_to_the_state_that_it_started_from(
    tmp_path: Path, undisturbed: Callable[[Layout], Undisturbed], layout: Layout
) -> None:
    """Before its first own checkpoint."""
    expected = undisturbed(layout)
    nodes = layout.create(tmp_path)
    copy_saved(expected.prefix, nodes[0].checkpoints, data_of=SAVED)
    taken = DIVERGED - SAVED
    events = run_nodes(nodes, layout.processes, **diverge(layout, taken - 2, taken))
    assert after_rollback(events) == expected.continued_losses
    assert shard_digests(nodes[0], STEPS) == expected.continued_digests


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("layout", "harm"),
    [
        (Layout(2, 1), damage),
        pytest.param(Layout(3, 1, "full_shard"), remove, marks=pytest.mark.slow),
        pytest.param(Layout(2, 2, "hybrid_shard"), damage, marks=pytest.mark.slow),
    ],
)
def test_node_with_a_damaged_file_gets_it_from_another_node(
    tmp_path: Path,
    undisturbed: Callable[[Layout], Undisturbed],
    layout: Layout,
    harm: Callable[[Path], None],
) -> None:
    """Each node lacks another file, and one also the marker; together they have all."""
    expected = undisturbed(layout)
    nodes = layout.create(tmp_path)
    copy_saved(expected.prefix, nodes[0].checkpoints, data_of=SAVED)
    sync = sync_nodes(nodes)
    folders = [node.node_checkpoints / step_folder_name(SAVED) for node in nodes]
    for number, folder in enumerate(folders):
        harm(folder / shard_file_name((number + 1) % len(nodes)))
    harm(folders[-1] / SAMPLER_FILE)
    (folders[0] / MARKER).unlink()
    events = run_nodes(nodes, layout.processes, sync=sync)

    [copied] = warnings(events, "checkpoint-files-copied")
    assert f"copying {len(nodes) + 2} files between nodes: " in copied["message"]
    assert losses(events) == {step: expected.losses[step] for step in range(SAVED + 1, STEPS + 1)}
    assert shard_digests(nodes[0], STEPS) == expected.digests


@pytest.mark.slow
def test_file_that_is_damaged_on_all_nodes_skips_the_checkpoint(
    tmp_path: Path, undisturbed: Callable[[Layout], Undisturbed]
) -> None:
    layout = Layout(2, 1)
    expected = undisturbed(layout)
    nodes = layout.create(tmp_path)
    shutil.copytree(expected.prefix, nodes[0].checkpoints)
    shutil.rmtree(nodes[0].checkpoints / step_folder_name(STEPS))
    damage(nodes[0].checkpoints / step_folder_name(DIVERGED) / shard_file_name(1))
    events = run_nodes(nodes, layout.processes)
    [skipped] = warnings(events, "checkpoint-skipped")
    assert "step-00000010 is skipped" in skipped["message"]
    assert "tensors-00001.safetensors does not match the marker" in skipped["message"]
    assert losses(events) == {step: expected.losses[step] for step in range(SAVED + 1, STEPS + 1)}
    # The damaged one was written again.
    digests = shard_digests(nodes[0], DIVERGED)
    assert digests[shard_file_name(1)] != shard_digests(nodes[0], STEPS)[shard_file_name(1)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(2, 2, "hybrid_shard")], ids=str)
def test_nodes_with_only_their_own_files_resume_together(
    tmp_path: Path, undisturbed: Callable[[Layout], Undisturbed], layout: Layout
) -> None:
    """As when the processes are started again on the same nodes, without a download from S3."""
    expected = undisturbed(layout)
    nodes = layout.create(tmp_path)
    sync = sync_nodes(nodes)
    with start_nodes(nodes, layout.processes, sync=sync) as running:
        running[0].wait_for("checkpoint", step=DIVERGED)
    for node in nodes:
        node.node_checkpoints.rename(node.base / "kept")
        shutil.rmtree(node.base / "kept" / step_folder_name(STEPS), ignore_errors=True)
    shutil.rmtree(nodes[0].checkpoints)
    sync = sync_nodes(nodes)
    for node in nodes:
        node.node_checkpoints.rmdir()
        (node.base / "kept").rename(node.node_checkpoints)
    events = run_nodes(nodes, layout.processes, sync=sync)
    assert warnings(events, "checkpoint-files-copied")
    resumed = losses(events)
    assert min(resumed) == DIVERGED + 1
    assert resumed == {step: expected.losses[step] for step in resumed}
    assert shard_digests(nodes[0], STEPS) == expected.digests


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_lost_instances_resume_from_what_was_uploaded(
    tmp_path: Path, undisturbed: Callable[[Layout], Undisturbed], seed: int
) -> None:
    """Uploads take random order and longer than the writing: S3 may lack the newest checkpoint."""
    layout = Layout(2, 1)
    expected = undisturbed(layout)
    nodes = layout.create(tmp_path)
    sync = sync_nodes(nodes, seed=seed, bytes_per_second=1e6)
    with start_nodes(nodes, layout.processes, sync=sync) as running:
        running[0].wait_for("checkpoint", step=DIVERGED)
        sync.finish(instances_lost=True)
    events = run_nodes(nodes, layout.processes)
    [start] = [event for event in events if event["kind"] == "start"]
    resumed = losses(events)
    # All of it may have been uploaded, if this test was slow to read the output.
    assert min(resumed, default=STEPS + 1) == start["resumed_from_step"] + 1
    assert resumed == {step: expected.losses[step] for step in resumed}
    assert shard_digests(nodes[0], STEPS) == expected.digests


class OneNodeCannotUpload(CheckpointSync):
    """Every upload of the last node fails; its deletions, and the other nodes, do not."""

    @staticmethod
    def _upload_all(node: NodeUploads, between_blocks: BetweenBlocks) -> None:
        if node.folder.parent.name == "algo-2":
            node.delete_removed()
            raise OSError("AccessDenied")
        CheckpointSync._upload_all(node, between_blocks)


@pytest.mark.slow
@pytest.mark.integration
def test_stored_checkpoint_survives_a_node_that_cannot_upload(tmp_path: Path) -> None:
    nodes = Layout(2, 1).create(tmp_path)
    change_steps(nodes, max_steps=4, every_steps=2)
    assert {event["step"] for event in run_nodes(nodes, 1) if event["kind"] == "checkpoint"} == {
        2,
        4,
    }
    change_steps(nodes, max_steps=20, every_steps=1)
    folders = [node.node_checkpoints for node in nodes]
    for folder in folders:
        shutil.rmtree(folder)
    sync = OneNodeCannotUpload(nodes[0].checkpoints, folders)
    events = run_nodes(nodes, 1, sync=sync)
    saved = [event for event in events if event["kind"] == "checkpoint"]
    assert [event["step"] for event in saved] == list(range(5, 21))
    assert {event["stored_step"] for event in saved} == {4}
    latest = checkpoint_files.latest_complete(nodes[0].checkpoints, lambda folder, reason: None)
    assert latest is not None
    assert latest.step == 4


def change_steps(nodes: list[Job], *, max_steps: int, every_steps: int) -> None:
    for node in nodes:
        file = node.bundle / "job.json"
        document = json.loads(file.read_text())
        document["8px"]["stage"]["max_steps"] = max_steps
        document["8px"]["checkpoint"]["every_steps"] = every_steps
        file.write_text(json.dumps(document))

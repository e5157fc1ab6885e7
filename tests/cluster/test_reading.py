"""Several nodes read one epoch: real processes under torchrun, shards assigned as by S3."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sm_train

from tests.support.cluster.training_jobs import (
    Job,
    free_port,
    start_python,
    tiny_run,
    write_shards,
)
from tests.support.data_channels import distribute_shards
from tests.support.deadline import DEADLINE
from tests.support.image_files import write_album

SHARDS, EACH = 5, 13
READ_EPOCH = Path(__file__).parents[1] / "support" / "cluster" / "read_epoch.py"


def read_epoch(
    folder: Path,
    shards: list[Path],
    *,
    num_nodes: int,
    local_world_size: int,
    max_steps: int,
    batch_size: int,
) -> list[dict[str, Any]]:
    """Run a job that resumes the last one in ``folder``; return the result of each rank."""
    hosts = [f"algo-{node_rank + 1}" for node_rank in range(num_nodes)]
    job = folder / f"job-{len(list(folder.glob('job-*')))}"
    port = str(free_port())
    channels = distribute_shards(shards, num_nodes, job / "channels")
    nodes = []
    for node_rank, host in enumerate(hosts):
        base = job / host
        config = base / "input" / "config"
        config.mkdir(parents=True)
        (base / "input" / "data").mkdir()
        (base / "input" / "data" / "train").symlink_to(channels[node_rank])
        resources = {"current_host": host, "hosts": hosts}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        command = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            str(num_nodes),
            "--node_rank",
            str(node_rank),
            "--nproc_per_node",
            str(local_world_size),
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            port,
            str(READ_EPOCH),
            str(base),
            str(folder / "sampler.npz"),
            str(max_steps),
            str(batch_size),
        ]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        nodes.append(start_python(command, cwd=job, env=environment))
    assert [node.wait(DEADLINE) for node in nodes] == [0] * num_nodes
    return [json.loads(path.read_text()) for path in sorted(job.glob("algo-*/read-*.json"))]


@pytest.mark.slow
def test_two_nodes_then_one_read_every_sample_once(tmp_path: Path) -> None:
    """2 nodes × 2 ranks for three steps, then 1 node × 3 ranks for the rest of the epoch."""
    write_shards(tmp_path / "shards", shards=SHARDS, each=EACH)
    shards = sorted((tmp_path / "shards").glob("*.tar"))
    started = read_epoch(
        tmp_path, shards, num_nodes=2, local_world_size=2, max_steps=3, batch_size=4
    )
    assert [rank["steps"] for rank in started] == [3] * 4
    finished = read_epoch(
        tmp_path, shards, num_nodes=1, local_world_size=3, max_steps=1000, batch_size=2
    )
    assert len({rank["steps"] for rank in finished}) == 1
    counts = Counter(caption for rank in started + finished for caption in rank["new_captions"])
    assert counts == Counter({f"a grey of {number}": 1 for number in range(SHARDS * EACH)})


@pytest.mark.slow
def test_nodes_with_unequal_shards_take_equal_steps(tmp_path: Path) -> None:
    """Three shards and two, on two ranks each: the second node repeats samples, and counts them."""
    write_shards(tmp_path / "shards", shards=SHARDS, each=EACH)
    shards = sorted((tmp_path / "shards").glob("*.tar"))
    ranks = read_epoch(
        tmp_path, shards, num_nodes=2, local_world_size=2, max_steps=1000, batch_size=4
    )
    [epoch_size] = {json.dumps(rank["epoch_size"]) for rank in ranks}
    captions = [caption for rank in ranks for caption in rank["new_captions"]]
    assert len(captions) == len(set(captions)) == SHARDS * EACH
    assert {rank["steps"] for rank in ranks} == {5}
    assert json.loads(epoch_size)["repeated"] == 5 * 4 * 4 - SHARDS * EACH


def job_on_a_pack(folder: Path, where: str) -> Job:
    """Return a job on nine packed images, of which every third one has a license."""
    write_album(folder / "in", 9, flat=True)
    rows = [
        {"image": f"{n:03}.jpg", "caption": "a", "license": None if n % 3 else "CC0"}
        for n in range(9)
    ]
    table = folder / "in" / "list.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sm_train.pack(table, folder / "packed", index_column="license")
    job = Job(folder / "job", tiny_run(max_steps=3, data={"where": where}))
    shutil.copytree(folder / "packed" / "shards", job.train_channel)
    index = job.train_channel.with_name("index")
    index.mkdir()
    shutil.copy(folder / "packed" / "index.parquet", index)
    return job


def test_a_job_reads_the_selected_samples(tmp_path: Path) -> None:
    code, events, text = job_on_a_pack(tmp_path, "license IS NOT NULL").run()
    assert code == 0, text
    epochs = [event for event in events if event["kind"] == "epoch"]
    assert {event["samples"] for event in epochs} == {3}


def test_a_job_says_in_one_line_why_its_condition_cannot_be_used(tmp_path: Path) -> None:
    job = job_on_a_pack(tmp_path, "licence IS NOT NULL")
    code, *_ = job.run()
    assert code != 0
    assert "data.where: the index has no column licence (did you mean license?)" in job.failure

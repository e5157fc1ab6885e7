"""Several nodes read one epoch: real processes under torchrun, shards assigned as by S3."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.training_jobs import free_port, start_python, write_shards
from tests.support.data_channels import distribute_shards
from tests.support.deadline import DEADLINE

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

"""Several nodes read one epoch: real processes under torchrun, shards dealt as S3 would."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.training_jobs import free_port, start_python, write_shards
from tests.support.data_channels import deal
from tests.support.deadline import DEADLINE

SHARDS, EACH = 5, 13
READ_EPOCH = Path(__file__).parents[1] / "support" / "cluster" / "read_epoch.py"


def read(
    folder: Path, data: list[Path], nodes: int, processes: int, steps: int, batch_size: int
) -> list[dict[str, Any]]:
    """What every process read in a job of its own; the job goes on where the last one stopped."""
    hosts = [f"algo-{node + 1}" for node in range(nodes)]
    job = folder / f"job-{len(list(folder.glob('job-*')))}"
    port = str(free_port())
    channels = deal(data, nodes, job / "dealt")
    running = []
    for node, host in enumerate(hosts):
        base = job / host
        config = base / "input" / "config"
        config.mkdir(parents=True)
        (base / "input" / "data").mkdir()
        (base / "input" / "data" / "train").symlink_to(channels[node])
        resources = {"current_host": host, "hosts": hosts}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        command = [
            "-m",
            "torch.distributed.run",
            "--nnodes",
            str(nodes),
            "--node_rank",
            str(node),
            "--nproc_per_node",
            str(processes),
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            port,
            str(READ_EPOCH),
            str(base),
            str(folder / "record.npz"),
            str(steps),
            str(batch_size),
        ]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        running.append(start_python(command, cwd=job, env=environment))
    assert [one.wait(DEADLINE) for one in running] == [0] * nodes
    return [json.loads(path.read_text()) for path in sorted(job.glob("algo-*/read-*.json"))]


@pytest.mark.slow
def test_two_nodes_then_one_read_every_sample_once(tmp_path: Path) -> None:
    """2 nodes × 2 processes for three steps, then one node × 3 for the rest of the epoch."""
    write_shards(tmp_path / "shards", shards=SHARDS, each=EACH)
    data = sorted((tmp_path / "shards").glob("*.tar"))
    first = read(tmp_path, data, nodes=2, processes=2, steps=3, batch_size=4)
    assert [one["steps"] for one in first] == [3] * 4
    rest = read(tmp_path, data, nodes=1, processes=3, steps=1000, batch_size=2)
    assert len({one["steps"] for one in rest}) == 1
    seen = Counter(caption for one in first + rest for caption in one["fresh"])
    assert seen == Counter({f"a grey of {number}": 1 for number in range(SHARDS * EACH)})


@pytest.mark.slow
def test_unequal_nodes_end_together_and_count_what_repeats(tmp_path: Path) -> None:
    """Three shards and two, on two processes each: the second node fills up."""
    write_shards(tmp_path / "shards", shards=SHARDS, each=EACH)
    data = sorted((tmp_path / "shards").glob("*.tar"))
    all_ranks = read(tmp_path, data, nodes=2, processes=2, steps=1000, batch_size=4)
    [balance] = {json.dumps(one["balance"]) for one in all_ranks}
    repeated = json.loads(balance)["repeated"]
    fresh = [caption for one in all_ranks for caption in one["fresh"]]
    assert len(fresh) == len(set(fresh)) == SHARDS * EACH
    assert {one["steps"] for one in all_ranks} == {5}
    assert repeated == 5 * 4 * 4 - SHARDS * EACH

"""Started by torchrun on each emulated node: reads one epoch as a job does, and writes it down."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from sm_train.entrypoints.common.job_config import DataConfig
from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.data.loader import Loader
from sm_train.entrypoints.data.shard_catalog import DataRank, build_catalog


def exchange(said: object) -> list[object]:
    everyones: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, said)
    return everyones


def main(base: Path, record: Path, steps: int, batch_size: int) -> None:
    """Read ``steps`` batches, or what is left of the epoch where there are fewer."""
    dist.init_process_group("gloo")
    directories = SageMakerPaths(base)
    hosts = ResourceConfig.read(directories)
    local = int(os.environ["LOCAL_RANK"])
    seat = DataRank(hosts.hosts, hosts.node_rank, local, int(os.environ["LOCAL_WORLD_SIZE"]))
    catalogue = build_catalog(
        directories.channel("train"), None, seat, exchange, directories.base / "walk"
    )
    loader = Loader(
        catalogue,
        seat,
        DataConfig("jpg;png", "txt", "center", "bicubic", False, 0.01),
        resolution=8,
        batch_size=batch_size,
        seed=0,
        decode_workers=1,
        state=record.read_bytes() if record.exists() else None,
    )
    left = loader.epoch_size().steps - loader.position.step
    fresh: list[str] = []
    stream = iter(loader)
    for _ in range(min(left, steps)):
        batch = next(stream)
        fresh += batch.captions[: len(batch.captions) - batch.num_repeated]
    dist.barrier()
    if dist.get_rank() == 0:
        record.write_bytes(loader.state_bytes())
    said = {"fresh": fresh, "steps": min(left, steps), "balance": asdict(loader.epoch_size())}
    (base / f"read-{local}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

"""Run by torchrun on each emulated node: reads one epoch as a job does and records the samples."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from itertools import compress
from pathlib import Path

import torch.distributed as dist
from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.data_loading.loader import open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank, build_catalog
from sm_train.entrypoints.job_interface.job_config import DataConfig

# This script runs without the tests package on its path, so it has its own configuration.
DATA_CONFIG = DataConfig(
    image_key="jpg;png",
    caption_key="txt",
    crop="center",
    decode="fast",
    icc_profile="srgb",
    hdr="reject",
    aspect_buckets=False,
    max_bad_fraction=0.01,
)


def all_gather(obj: object) -> list[object]:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, obj)
    return gathered


def main(base: Path, state_file: Path, max_steps: int, batch_size: int) -> None:
    """Read ``max_steps`` batches, or the rest of the epoch if that is shorter."""
    dist.init_process_group("gloo")
    paths = SageMakerPaths(base)
    resources = ResourceConfig.read(paths)
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = DataRank(
        resources.hosts, resources.node_rank, local_rank, int(os.environ["LOCAL_WORLD_SIZE"])
    )
    catalog = build_catalog(paths.channel("train"), None, rank, all_gather, paths.base / "scan")
    loader = open_loader(
        catalog,
        rank,
        DATA_CONFIG,
        resolution=8,
        batch_size=batch_size,
        seed=0,
        decode_workers=1,
        state=state_file.read_bytes() if state_file.exists() else None,
    )
    steps = min(loader.epoch_size().steps - loader.position.step, max_steps)
    new_captions: list[str] = []
    stream = iter(loader)
    for _ in range(steps):
        batch = next(stream)
        new_captions += compress(batch.captions, batch.is_new)
    dist.barrier()  # every rank has read the state file before it is overwritten
    if dist.get_rank() == 0:
        state_file.write_bytes(loader.state_bytes())
    result = {
        "new_captions": new_captions,
        "steps": steps,
        "epoch_size": asdict(loader.epoch_size()),
    }
    (base / f"read-{local_rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

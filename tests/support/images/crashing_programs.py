"""Programs that are run with crashing decoders: packing, and a loader that prints its batches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sm_train.entrypoints.data_loading.loader import Loader
from sm_train.toolkit import cli

from tests.support.data_channels import Cluster


def main() -> None:
    program, *arguments = sys.argv[1:]
    if program == "pack":
        sys.argv = ["sm-train", "pack", *arguments]
        cli.main()
    shards, workers, saved_after, scratch = arguments
    print_batches(Path(shards), int(workers), int(saved_after), Path(scratch))


def print_batches(shards: Path, workers: int, saved_after: int, scratch: Path) -> None:
    """Print the batches of an epoch as JSON lines; restart the loader after some of them."""
    index = shards.parent / "index.parquet"
    for state in ("new", "resumed"):
        saved = scratch / "sampler"
        loader = Cluster([shards], 1, scratch / state, index).loaders(
            decode_workers=workers, state=saved.read_bytes() if saved.exists() else None
        )[0]
        take(loader, saved_after if state == "new" else loader.epoch_size().steps)
        saved.write_bytes(loader.state_bytes())


def take(loader: Loader, stop: int) -> None:
    batches = iter(loader)
    while loader.position.step < stop:
        batch = next(batches)
        bad = [[sample.key, sample.reason, sample.detail] for sample in batch.bad_samples]
        pixels = int(batch.pixels.long().sum())
        line = {"captions": batch.captions, "bad": bad, "pixels": pixels}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

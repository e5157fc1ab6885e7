"""The built-in training's loader as a PyTorch data set, for any model."""

from __future__ import annotations

import base64
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from sm_train.entrypoints.base.error import Error
from sm_train.entrypoints.data_loading.loader import Loader, open_loader
from sm_train.entrypoints.data_loading.shard_catalog import DataRank
from sm_train.entrypoints.data_loading.shard_channels import (
    ShardChannel,
    as_of_checkpoint,
    job_channels,
    list_channels,
)
from sm_train.entrypoints.distributed.object_exchange import all_gather
from sm_train.entrypoints.job_interface.index_location import index_path, removal_list
from sm_train.entrypoints.job_interface.job_config import DataConfig, ExtraKind
from sm_train.entrypoints.lineage.record_log import open_record
from sm_train.entrypoints.sample_metadata.color_counts import recorded_color
from sm_train.entrypoints.script.current_job import ScriptProcess, script_process
from sm_train.entrypoints.script.folder_data import folder_config
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info


class ImageBatch(TypedDict):
    """``pixel_values`` is uint8 (B, 3, H, W); ``captions`` has B texts.

    ``extras`` are the tensors of ``data.extras`` by name: images uint8 (B, 3, H, W), masks uint8
    and maps float32 (B, 1, H, W), arrays float32 (B, *shape).
    """

    pixel_values: Tensor
    captions: list[str]
    extras: dict[str, Tensor]


@dataclass(frozen=True)
class _Source:
    """Channels of shards, the rank that reads them, and their observer."""

    channels: list[ShardChannel]
    rank: DataRank
    config: DataConfig
    process: ScriptProcess | None


class ShardDataset(IterableDataset[ImageBatch]):
    """Yields this rank's batches of images and captions without end, epoch after epoch.

    Shards are read and images decoded ahead in processes of its own, so iterate over it directly,
    or use ``DataLoader(dataset, batch_size=None)``. ``state_dict`` is the position after the last
    batch that the loop has taken; it is equal on all ranks, and a job with another number of ranks
    continues the epoch.

    A sample that cannot be used is replaced by another one, counted in :attr:`bad_samples` and
    reported: as an event of the job, or as a Python warning outside of one.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        batch_size: int | None = None,
        resolution: int | None = None,
        seed: int | None = None,
        decode_workers: int | None = None,
        **data: Any,
    ) -> None:
        """Plan to read the shards in ``folder``; default: the job's training data.

        Defaults of the others are those of the run file. Outside of a job all are required, but
        for ``data``: keys of the run file's section ``data``, such as ``where="license = 'CC0'"``,
        ``caption={"txt": 1}``, ``crop="random"`` or ``icc_profile="ignore"``.

        Raises:
            Error: an argument is missing outside of a job, or a key of ``data`` is unknown, has an
                invalid value, or is given in a job, whose run file states it.
        """
        super().__init__()
        if folder is None and data:
            raise Error(f"ShardDataset: {', '.join(data)}: in a job, state them in the run file")
        self._source = _job_source() if folder is None else _folder_source(Path(folder), data)
        process = self._source.process
        given: dict[str, Any] = {
            "batch_size": batch_size,
            "resolution": resolution,
            "seed": seed,
            "decode_workers": decode_workers,
        }
        if process is not None:
            stage, training = process.config.stage, process.config.training
            defaults = {
                "batch_size": stage.per_device_batch_size,
                "resolution": stage.resolution,
                "seed": training.seed,
                "decode_workers": training.decode_workers,
            }
            given |= {name: defaults[name] for name, value in given.items() if value is None}
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise Error(f"ShardDataset({folder}): outside of a job, pass {', '.join(missing)}")
        # With it, the order on one instance does not depend on the number of ranks.
        given["gradient_accumulation_steps"] = (
            1 if process is None else process.config.stage.gradient_accumulation_steps
        )
        self._options = given
        self._state: bytes | None = None
        self._loader: Loader | None = None

    def __iter__(self) -> Iterator[ImageBatch]:
        """Yield batches.

        Raises:
            DataError: more samples are bad than ``data.max_bad_fraction`` allows: 1 % by default.
        """
        if get_worker_info() is not None:
            raise Error(
                "ShardDataset reads and decodes ahead itself; use num_workers=0, or iterate over it"
            )
        # Another iteration continues after the last batch that was taken.
        self._state = self._position()
        self._loader = self._open()
        observer = self._source.process and self._source.process.observer
        batches = iter(self._loader)
        while True:
            if observer:
                observer.before_batch(None)
            batch = next(batches)
            if observer:
                observer.after_batch(None)
            pixels = batch.pixels.permute(0, 3, 1, 2)
            extras = {
                extra.name: _channels_first(extra.kind, batch.extras[extra.name])
                for extra in self._source.config.extras
            }
            yield {"pixel_values": pixels, "captions": batch.captions, "extras": extras}

    def _open(self) -> Loader:
        """List the shards, a collective, and return the loader at the present position."""
        source = self._source
        shards = list_channels(source.channels, source.config, source.rank, all_gather)
        shards = as_of_checkpoint(shards, source.channels, source.config, self._state, all_gather)
        # Images, even if the shards hold latents for the built-in training.
        shards = replace(shards, options={**shards.options, "latents": None})
        loader = open_loader(
            shards,
            source.rank,
            source.config,
            state=self._state,
            pin_memory=torch.cuda.is_available(),
            report=_warn if source.process is None else source.process.events.warn_of_bad_samples,
            warn=_warn_of_code if source.process is None else source.process.events.warn,
            **self._options,
        )
        process = source.process
        if process is not None and process.rank.rank == 0 and process.config.checkpoint.save:
            folder = process.paths.checkpoints
            open_record(folder, process.config, shards, loader, step=0, accumulation=None)
        reader = loader.reader
        if reader.resume_warning and process is not None and process.rank.rank == 0:
            process.events.warn(reader.resume_code, reader.resume_warning)
        return loader

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, from 0."""
        return 0 if self._loader is None else self._loader.epoch

    @property
    def bad_samples(self) -> dict[str, int]:
        """The samples of this iteration that could not be used, by reason."""
        return {} if self._loader is None else dict(self._loader.bad_samples.reasons)

    def state_dict(self) -> dict[str, str]:
        """Return the position after the last batch that the loop has taken, as JSON values."""
        position = self._position()
        if position is None:
            return {}
        color = vars(self._source.config.color)
        return {"position": base64.b64encode(position).decode(), **color}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Continue from a position at the next iteration, with its color policy."""
        self._loader = None
        self._state = base64.b64decode(state["position"]) if state else None
        config = self._source.config
        kept = recorded_color(state) if state else config.color
        if kept != config.color:
            message = f"the state began with {kept} and keeps it, instead of {config.color}"
            warnings.warn(message, stacklevel=2)
            changed = replace(config, **vars(kept))
            self._source = replace(self._source, config=changed)

    def _position(self) -> bytes | None:
        return self._state if self._loader is None else self._loader.state_bytes()


def _warn(message: str, reasons: dict[str, int], samples: int) -> None:
    warnings.warn(message, stacklevel=2)


def _warn_of_code(code: str, message: str) -> None:
    warnings.warn(f"{code}: {message}", stacklevel=2)


def _channels_first(kind: ExtraKind, tensor: Tensor) -> Tensor:
    if kind == "image":
        return tensor.permute(0, 3, 1, 2)
    return tensor if kind == "array" else tensor[:, None]


def _job_source() -> _Source:
    process = script_process()
    paths, rank = process.paths, process.rank
    local_world_size = rank.world_size // rank.nodes
    data_rank = DataRank(process.resources.hosts, rank.node, rank.local_rank, local_world_size)
    data = process.config.data
    return _Source(job_channels(data, paths), data_rank, data, process)


def _folder_source(folder: Path, data: dict[str, Any]) -> _Source:
    """Return a folder of shards, read by the ranks of this machine.

    Raises:
        Error: a key of ``data`` is unknown or has an invalid value.
    """
    index = index_path(folder)
    local_rank, ranks = (int(os.environ.get(name, default)) for name, default in _LOCAL)
    config = folder_config(data)
    rank = DataRank(("localhost",), 0, local_rank, ranks)
    found = index if index.exists() else None
    scans = folder.parent / ".scans"
    channel = ShardChannel("train", folder, found, config.where, scans, removal_list(str(index)))
    return _Source([channel], rank, config, None)


_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))

"""Turn a checkpoint into a model that other tools load: diffusers folder, single file or DCP.

Every format starts from the weights of a complete, verified checkpoint and its components folder,
or from a model folder. The world size and sharding of the training do not matter. Tensors are
assembled one at a time.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import (
    EMA,
    MODEL,
    CheckpointError,
    parse_marker,
    shard_files,
)
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardedTensorError, TensorReader
from sm_train.entrypoints.models.image_sampling import ModelSource, latest_grid
from sm_train.entrypoints.models.model_card import TrainingRecord
from sm_train.entrypoints.models.model_folder import model_files, require_loadable
from sm_train.entrypoints.models.model_folders import (
    TrainedWeights,
    copy_model_files,
    merged_weights,
    save_model,
)
from sm_train.entrypoints.models.single_file import SINGLE_FILE_CLASSES, write_single_file
from sm_train.entrypoints.models.trained_network import network_folder
from sm_train.entrypoints.models.weight_files import (
    TensorSpec,
    convert_file,
    read_layout,
    read_tensors,
)
from torch import Tensor

ExportFormat = Literal["diffusers", "single-file", "dcp"]
WeightsKind = Literal["ema", "raw"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Progress = Callable[[int], None]
"""Receives the bytes that were written since the last call."""

_ORDER = ("network.", "text_encoder.")
"""Prefixes of trained tensors, in the order in which a model is written."""


@dataclass(frozen=True)
class ExportOptions:
    """What to write; None keeps the EMA weights if there are any, and the stored precision.

    ``merge`` adds an adapter to the weights of the model that it extends.
    """

    format: ExportFormat
    weights: WeightsKind | None = None
    dtype: torch.dtype | None = None
    merge: bool = False


def export(
    source: ModelSource, options: ExportOptions, out: Path, scratch: Path, progress: Progress
) -> None:
    """Write the model to ``out``, which must not exist; ``scratch`` is an empty folder.

    Raises:
        CheckpointError: the checkpoint is damaged, or the model has no such format or weights.
    """
    require_format(source, options.format, merge=options.merge)
    require_loadable(source.model)
    folder = out if options.format == "diffusers" else scratch / "model"
    folder.mkdir(parents=True)
    copy = _copier(options.dtype, progress)
    if source.checkpoint is None:
        if options.weights == "raw":
            raise CheckpointError(
                f"{source.weights}: a final model has only its final weights; give a checkpoint "
                "(step-…) for --weights raw"
            )
        if options.merge:
            raise CheckpointError(
                f"{source.weights}: --merge reads checkpoints; give the run's checkpoints or a "
                "step-… folder"
            )
        copy_model_files(source.weights, folder, copy)
    else:
        weights = _checkpoint_weights(source.checkpoint, options)
        grid = latest_grid(source.checkpoint.parent, weights.step)
        try:
            if options.merge:
                weights = merged_weights(source.model, weights).converted(options.dtype)
            save_model(source.model, weights, folder, grid=grid, copy=copy, on_tensor=progress)
        except ShardedTensorError as error:
            raise CheckpointError(f"{source.checkpoint}: {error}") from None
        except RuntimeError:
            raise CheckpointError(
                f"{source.checkpoint}: belongs to another model than {source.model}"
            ) from None
    if options.format == "single-file":
        write_single_file(folder, out, progress)
    elif options.format == "dcp":
        _write_dcp(folder, out)


def require_format(source: ModelSource, wanted: ExportFormat, *, merge: bool) -> None:
    """Refuse a format that the model does not have, before anything is copied.

    Raises:
        CheckpointError: only some pipelines have a single-file layout, and an adapter has no other
            format than its own.
    """
    class_name, is_adapter = _pipeline_class(source)
    if merge and not is_adapter:
        raise CheckpointError(f"--merge: {source.weights} holds no adapter; remove --merge")
    if is_adapter and not merge and wanted != "diffusers":
        raise CheckpointError(
            f"--format {wanted}: {source.weights} holds an adapter; add --merge to write the whole "
            "model, or use --format diffusers"
        )
    if wanted == "single-file" and class_name not in SINGLE_FILE_CLASSES:
        raise CheckpointError(
            f"--format single-file: {class_name} has no original single-file layout here, only sd2 "
            "and sdxl have; use --format diffusers"
        )


def _pipeline_class(source: ModelSource) -> tuple[str, bool]:
    """Return the class that the model's index names, and whether an adapter was trained.

    Raises:
        CheckpointError: the index cannot be read.
    """
    path = source.model / ("model_index.json" if source.is_model_folder else "components.json")
    is_adapter = False
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not source.is_model_folder:
            TrainingRecord.parse(document["record"])
            is_adapter = document["base"] is not None
            document = document["index"]
        class_name = document["_class_name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(
            f"{path}: is missing, damaged or of an earlier version; resume the run once to write it"
        ) from None
    return str(class_name if isinstance(class_name, str) else class_name[-1]), is_adapter


def export_bytes(source: ModelSource, options: ExportOptions) -> int:
    """Return the bytes that :func:`export` reports as progress."""
    _, is_adapter = _pipeline_class(source)
    copied = source.weights if source.checkpoint is None else source.model
    frozen = [copied / name for name in model_files(copied)]
    if is_adapter and not options.merge and source.checkpoint is not None:
        frozen = []
    total = sum(path.stat().st_size for path in frozen)
    if source.checkpoint is not None:
        layout = _checkpoint_weights(source.checkpoint, options).layout
        total += sum(spec.bytes for spec in layout.values())
    return total * 2 if options.format == "single-file" else total


def _copier(dtype: torch.dtype | None, progress: Progress) -> Callable[[str, str], object]:
    def copy(source: str, target: str) -> None:
        size = Path(source).stat().st_size
        if dtype is not None and source.endswith(".safetensors"):
            convert_file(Path(source), Path(target), dtype)
        else:
            shutil.copy2(source, target)
        progress(size)

    return copy


def _checkpoint_weights(folder: Path, options: ExportOptions) -> TrainedWeights:
    """Return the trained tensors of a complete checkpoint; buffers have no EMA.

    Raises:
        CheckpointError: it is incomplete, or has no EMA and ``options`` asks for it.
    """
    reader = TensorReader(shard_files(folder))
    stored = reader.stored
    names = [name.removeprefix(MODEL) for name in stored if name.startswith(MODEL)]
    has_ema = any(name.startswith(EMA) for name in stored)
    if options.weights == "ema" and not has_ema:
        raise CheckpointError(
            f"{folder}: has no EMA weights (training.ema_decay: 0); use --weights raw"
        )
    ordered = [name for prefix in _ORDER for name in names if name.startswith(prefix)]
    use_ema = has_ema and options.weights != "raw"
    chosen = {
        name: f"{EMA}{name}" if use_ema and f"{EMA}{name}" in stored else f"{MODEL}{name}"
        for name in ordered
    }
    layout = {
        name: TensorSpec(stored[key].dtype, stored[key].shape).converted(options.dtype)
        for name, key in chosen.items()
    }
    return TrainedWeights(
        ((name, reader.load(key)) for name, key in chosen.items()),
        layout,
        parse_marker(folder).step,
        "ema" if use_ema else "raw",
    )


def _write_dcp(model: Path, out: Path) -> None:
    """Write the network's weights by PyTorch's Distributed Checkpoint.

    Names are those of diffusers under the network's folder name: ``unet.conv_in.weight``. Tensors
    are mapped from the files, so memory does not grow with the model.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    network = network_folder(model)
    assert network is not None
    state = {f"{network.name}.{name}": tensor for name, tensor in _mapped(network)}
    with warnings.catch_warnings():
        # PyTorch warns that there is no process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=out)


def _mapped(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        yield from read_tensors(path, read_layout(path))

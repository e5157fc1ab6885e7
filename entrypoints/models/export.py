"""Model folders in diffusers' own ``save_pretrained`` layout, and frames for checkpoints.

A frame is everything of a model but the weights that are trained, which a checkpoint has: the
frozen parts as they came, the scheduler, and in ``frame.json`` the network's configuration.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.common.atomic_write import write_atomic
from sm_train.entrypoints.models import pipeline as pipeline_module
from sm_train.entrypoints.models.builder import ModelComponents, load_text_encoders
from sm_train.entrypoints.models.network import NETWORKS, Network, network_folder
from sm_train.entrypoints.models.objectives import SAMPLERS
from sm_train.entrypoints.models.pipeline import TextToImagePipeline
from torch import Tensor

_PIPELINE_FILE = "pipeline.py"
_INDEX = "model_index.json"
_FRAME = "frame.json"
_WEIGHTS = "diffusion_pytorch_model"
_FILE_BYTES = 5 * 10**9
"""Of one file of weights, at most: what is held in memory while a model is written."""


def save_frame(parts: ModelComponents, folder: Path) -> None:
    """Save what training does not change, so that any checkpoint can be drawn from.

    Before training, which may keep frozen parts in half precision.
    """
    index = _save_frozen(parts, folder)
    if parts.train_text_encoder:
        _save_text_config(parts, folder)
        index["text_encoder"] = ["transformers", _class_name(parts.text.encoders[0])]
    index[parts.built.part] = ["diffusers", parts.built.class_name]
    _write_json({"index": index, "network": parts.built.config()}, folder / _FRAME)


def is_frame(folder: Path) -> bool:
    return (folder / _FRAME).is_file()


def _read_frame(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / _FRAME).read_text(encoding="utf-8"))
    return document


def save_model(
    frame: Path, parts: ModelComponents, weights: Iterable[tuple[str, Tensor]], folder: Path
) -> None:
    """Save the trained ``parts`` below ``folder`` in their ``frame``, with the pipeline's code.

    ``weights`` are the full trained tensors, with the names and order of
    :meth:`ModelComponents.trained`. ``model_index.json`` is written last: a folder without it is
    not a model yet.
    """
    document = _read_frame(frame)
    shutil.copytree(frame, folder, ignore=lambda *_: [_FRAME], dirs_exist_ok=True)
    target = folder / parts.built.part
    target.mkdir(exist_ok=True)
    _write_json(document["network"], target / "config.json")
    for part, named in groupby(weights, lambda pair: pair[0].partition(".")[0]):
        own = ((name.partition(".")[2], tensor) for name, tensor in named)
        if part == "network":
            _save_weights(parts.network.state_dict(), own, target)
        else:
            _save_file(dict(own), folder / part / "model.safetensors")
    shutil.copyfile(pipeline_module.__file__, folder / _PIPELINE_FILE)
    own_class = [Path(_PIPELINE_FILE).stem, TextToImagePipeline.__name__]
    _write_json(document["index"] | {"_class_name": own_class}, folder / _INDEX)


def _write_json(document: Mapping[str, Any], path: Path) -> None:
    write_atomic(path, (json.dumps(document, indent=2) + "\n").encode())


def _save_frozen(parts: ModelComponents, folder: Path) -> dict[str, Any]:
    """Save all that is not trained, each file whole; the index of what was saved."""
    _without_progress_bars()
    trained = [*parts.trained().children()]
    others = {name: part for name, part in parts.folders().items() if part not in trained}
    staging = folder / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    TextToImagePipeline(**others).save_pretrained(staging)
    index: dict[str, Any] = json.loads((staging / _INDEX).read_text(encoding="utf-8"))
    (staging / _INDEX).unlink()
    for path in sorted(staging.rglob("*")):
        target = folder / path.relative_to(staging)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            path.replace(target)
    shutil.rmtree(staging)
    return index


def _save_weights(
    layout: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], folder: Path
) -> None:
    """Write the weights as they come, in files as diffusers splits them."""
    files = _files({name: one.numel() * one.element_size() for name, one in layout.items()})
    place = {name: file for file, names in files.items() for name in names}
    held: dict[str, Tensor] = {}
    for name, tensor in weights:
        held[name] = tensor.to("cpu")
        if name == files[place[name]][-1]:
            _save_file(held, folder / place[name])
            held = {}
    if len(files) > 1:
        total = sum(one.numel() * one.element_size() for one in layout.values())
        index = {"metadata": {"total_size": total}, "weight_map": place}
        _write_json(index, folder / f"{_WEIGHTS}.safetensors.index.json")


def _save_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    ready = {name: one.to("cpu").contiguous() for name, one in tensors.items()}
    save_file(ready, path, metadata={"format": "pt"})


def _save_text_config(parts: ModelComponents, folder: Path) -> None:
    """Of the text encoder that is trained."""
    [encoder] = parts.text.encoders
    encoder.config.architectures = [_class_name(encoder)]
    encoder.config.save_pretrained(folder / "text_encoder")


def _class_name(module: Any) -> str:
    """FSDP2 puts its name before that of the class."""
    return type(module).__name__.removeprefix("FSDP")


def _files(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The names of the tensors in each file, in their order."""
    groups: list[list[str]] = [[]]
    room = _FILE_BYTES
    for name, size in sizes.items():
        if size > room and groups[-1]:
            groups.append([])
            room = _FILE_BYTES
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {f"{_WEIGHTS}.safetensors": groups[0]}
    count = len(groups)
    return {
        f"{_WEIGHTS}-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def load_model(folder: Path) -> TextToImagePipeline:
    """Load what :func:`save_model` wrote, part by part: code that lies in the folder is not run."""
    network = network_folder(folder)
    assert network is not None
    return _pipeline(folder, {network.name: _load(network, "config.json", NETWORKS)})


def load_frame(folder: Path, weights: Mapping[str, Tensor]) -> TextToImagePipeline:
    """The pipeline of a frame with ``weights``, by their names in :meth:`ModelComponents.trained`.

    Raises:
        RuntimeError: they are those of another model.
    """
    config = _read_frame(folder)["network"]
    network = Network(config | {"class": config["_class_name"]}, None, config["sample_size"])
    network.allocate(torch.device("cpu"))
    network.module.load_state_dict(_below("network.", weights))
    pipeline = _pipeline(folder, {network.part: network.module.eval()})
    if text_encoder := _below("text_encoder.", weights):
        pipeline.text_encoder.load_state_dict(text_encoder)
    return pipeline


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)
    }


def _pipeline(folder: Path, network: Mapping[str, Any]) -> TextToImagePipeline:
    from diffusers import AutoencoderKL

    _without_progress_bars()
    text = load_text_encoders(folder, frame=is_frame(folder))
    assert text is not None
    scheduler = _load(folder / "scheduler", "scheduler_config.json", SAMPLERS)
    vae = folder / "vae"
    loaded = AutoencoderKL.from_pretrained(vae, local_files_only=True) if vae.is_dir() else None
    return TextToImagePipeline(scheduler=scheduler, vae=loaded, **network, **text.folders())


def _load(folder: Path, config: str, known: tuple[str, ...]) -> Any:
    """A part by the class that its configuration names, if that is a known one."""
    import diffusers

    kind = json.loads((folder / config).read_text(encoding="utf-8")).get("_class_name")
    if kind not in known:
        raise ValueError(f"{folder.name} is a {kind}, none of {', '.join(known)}")
    return getattr(diffusers, kind).from_pretrained(folder, local_files_only=True)


def _without_progress_bars() -> None:
    """Loading and saving print bars, on a terminal or not; a log and a command want none."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()

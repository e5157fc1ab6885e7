"""Save and load model folders in diffusers' ``save_pretrained`` layout.

A run's checkpoints hold the trained weights alone. Next to them a *components folder* holds the
rest of the model: frozen components, the scheduler, and in ``components.json`` the pipeline's index
and the network's configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from sm_train.entrypoints.base.atomic_write import (
    NOT_UPLOADED_SUFFIX,
    durable_replace,
    write_atomic,
)
from sm_train.entrypoints.checkpoints.safetensors_header import torch_type
from sm_train.entrypoints.job_interface.job_config import LoraConfig
from sm_train.entrypoints.models import pipeline as pipeline_module
from sm_train.entrypoints.models.builder import (
    ModelComponents,
    load_autoencoder,
    load_text_encoders,
)
from sm_train.entrypoints.models.component_files import (
    LocalComponents,
    read_file_header,
    weight_files,
)
from sm_train.entrypoints.models.components import component_files
from sm_train.entrypoints.models.lora import (
    base_digest,
    file_names,
    is_adapter,
    merge,
    scaled,
    write_adapter,
)
from sm_train.entrypoints.models.model_card import (
    CARD_FILE,
    GRID_FILE,
    TrainingRecord,
    model_card,
)
from sm_train.entrypoints.models.model_folder import INDEX_FILE, PIPELINE_FILE, model_files
from sm_train.entrypoints.models.objectives import INFERENCE_SCHEDULERS
from sm_train.entrypoints.models.pipeline import TextToImagePipeline
from sm_train.entrypoints.models.pipeline_class import (
    loads_adapters,
    standard_index,
    standard_pipeline,
)
from sm_train.entrypoints.models.trained_network import (
    NETWORKS,
    Network,
    network_component,
    network_folder,
)
from sm_train.entrypoints.models.weight_files import (
    Layout,
    TensorSpec,
    write_network,
    write_tensors,
)
from sm_train.entrypoints.records.upload_notes import UPLOAD_NOTES
from torch import Tensor, nn

_MANIFEST = "components.json"
_DESCRIPTIONS = (".json", ".txt", ".model")
"""Suffixes of configurations and vocabularies. Weights in other formats are not loaded."""

_HALF_PRECISIONS = ("F16", "BF16")
"""Types of safetensors files in which a component may be stored."""


def save_components(
    parts: ModelComponents,
    source: Path | None,
    record: TrainingRecord,
    folder: Path,
    seed: int = 0,
) -> bool:
    """Save the components folder, with which any checkpoint can be sampled from.

    ``source`` is the folder that the frozen components were loaded from, None if they are random.
    ``record`` is for the model's card. ``seed`` is that of random weights. A network that an
    adapter extends is frozen, too. The components are written in the precision that ``source``
    stores, and not at all if ``folder`` has them already, as after a restart. Return whether they
    were written. Call it before training, which may convert them to bf16.
    """
    frozen, network_init = _frozen_components(parts), parts.network_init
    digest = None if source is None else _source_digest(parts, source)
    if digest is not None and network_init.lora is not None and network_init.folder is not None:
        digest += f"-{base_digest(network_init.folder)}"
    saved = _read_manifest(folder) if is_components_folder(folder) else {}
    unchanged = digest is not None and not parts.random_frozen and _holds(folder, saved, digest)
    if unchanged:
        index, files = saved["frozen_index"], saved["files"]
    else:
        # Without the manifest the folder counts as incomplete while files are replaced.
        (folder / _MANIFEST).unlink(missing_ok=True)
        index, files = _save_frozen(frozen, source, folder)
        if network_init.lora is not None and network_init.folder is not None:
            files |= _copy_network(network_init.folder, folder)
    document = {"source": digest, "frozen_index": dict(index), "files": files}
    if parts.train_text_encoder:
        _save_text_config(parts, folder)
        index["text_encoder"] = ["transformers", _class_name(parts.text_encoders.encoders[0])]
    index[network_init.component] = ["diffusers", network_init.class_name]
    network = network_init.config()
    document |= {"index": _model_index(parts, index, network), "network": network}
    document |= {"record": record.as_dict(), "base": _base(network_init, seed)}
    _write_json(document, folder / _MANIFEST)
    return not unchanged


def _source_digest(parts: ModelComponents, source: Path) -> str:
    """Return what identifies the frozen components: their tensors, configurations, vocabularies."""
    digest = hashlib.sha256(json.dumps(parts.identities, sort_keys=True).encode())
    for path in component_files(source):
        if path.suffix in _DESCRIPTIONS:
            digest.update(path.relative_to(source).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _base(network: Network, seed: int) -> dict[str, Any] | None:
    """Return what :func:`_merged_network` needs; None if all weights are trained."""
    if network.lora is None:
        return None
    return {
        "lora": asdict(network.lora),
        "config": dict(network.preset_config),
        "side": network.side,
        "random": network.folder is None,
        "seed": seed,
    }


def _copy_network(source: Path, folder: Path) -> dict[str, int]:
    """Copy the files of a network to a components folder; return their sizes."""
    weights = weight_files(LocalComponents(source.parent), source.name)
    index = [weights.index] if weights.index else []
    names = [f"{source.name}/config.json", *weights.paths, *index]
    (folder / source.name).mkdir(exist_ok=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
        try:
            os.link(source.parent / name, folder / name)
        except OSError:
            # Atomic: an interrupted copy leaves no file under this name.
            partial = (folder / name).with_suffix(NOT_UPLOADED_SUFFIX)
            shutil.copyfile(source.parent / name, partial)
            durable_replace(partial, folder / name)
    return {name: (folder / name).stat().st_size for name in names}


def _model_index(
    parts: ModelComponents, index: Mapping[str, Any], network: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``model_index.json`` for a standard pipeline class if one can run the model."""
    standard = standard_pipeline(
        network,
        [_class_name(encoder) for encoder in parts.text_encoders.encoders],
        type(parts.objective.inference_scheduler()).__name__,
        has_vae=parts.vae is not None,
    )
    if standard is not None:
        return standard_index(standard, index)
    return {**index, "_class_name": [Path(PIPELINE_FILE).stem, TextToImagePipeline.__name__]}


def _holds(folder: Path, manifest: Mapping[str, Any], digest: str) -> bool:
    """Return whether ``folder`` has every file of the frozen components with ``digest``.

    An upload of the folder that was cut short may lack some.
    """
    files = manifest.get("files", {})
    return manifest.get("source") == digest and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in files.items()
    )


def is_components_folder(folder: Path) -> bool:
    """Return whether :func:`save_components` wrote ``folder``."""
    return (folder / _MANIFEST).is_file()


def _read_manifest(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    return document


@dataclass(frozen=True)
class TrainedWeights:
    """The full trained tensors after optimizer ``step``, streamed one after the other.

    Names are those of :meth:`ModelComponents.trained_module`, all of the network before those of a
    text encoder. ``layout`` is in the same order, in the precision to write. ``kind`` is ``ema`` or
    ``raw``.
    """

    tensors: Iterable[tuple[str, Tensor]]
    layout: Layout
    step: int
    kind: str

    def converted(self, dtype: torch.dtype | None) -> TrainedWeights:
        """Return the same weights, to write in another precision."""
        layout = {name: spec.converted(dtype) for name, spec in self.layout.items()}
        return replace(self, layout=layout)


def save_model(
    components_folder: Path,
    weights: TrainedWeights,
    folder: Path,
    *,
    grid: Path | None = None,
    copy: Callable[[str, str], object] = shutil.copy2,
    on_tensor: Callable[[int], None] = lambda _: None,
) -> None:
    """Save the trained model to ``folder``, with its card and, if needed, the pipeline's code.

    Of an adapter only its file and the card are saved. ``components_folder`` provides what was not
    trained: ``copy`` copies each file. ``grid`` is a PNG of samples for the card. ``on_tensor``
    receives the bytes of each trained tensor once it is written. ``model_index.json`` is written
    last: a folder without it is incomplete.
    """
    document = _read_manifest(components_folder)
    if document.get("base") and is_adapter(next(iter(weights.layout))):
        _save_adapter(document, weights, folder, grid, on_tensor)
        return
    network, index = document["network"], document["index"]
    component_name = network_component(network["_class_name"])
    # An adapter's frozen network is replaced by the one with the adapter.
    copy_model_files(components_folder, folder, copy, without=component_name)
    target = folder / component_name
    target.mkdir(exist_ok=True)
    _write_json(network, target / "config.json")
    tensors = iter(weights.tensors)
    for component, layout in _by_component(weights.layout).items():
        named = ((name.partition(".")[2], tensor) for name, tensor in islice(tensors, len(layout)))
        if component == "network":
            write_network(target, layout, named, on_tensor)
        else:
            write_tensors(folder / component / "model.safetensors", layout, named)
    if isinstance(index["_class_name"], list):
        shutil.copyfile(pipeline_module.__file__, folder / PIPELINE_FILE)
    if grid is not None:
        shutil.copyfile(grid, folder / GRID_FILE)
    write_atomic(folder / CARD_FILE, _card(document, weights, has_grid=grid is not None).encode())
    _write_json(index, folder / INDEX_FILE)


def copy_model_files(
    source: Path, folder: Path, copy: Callable[[str, str], object], *, without: str | None = None
) -> None:
    """Copy the files of a model or components folder, each by ``copy``, and nothing else.

    ``without`` is a component that is left out.

    Raises:
        CheckpointError: a file is a link that leads out of the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in model_files(source):
        if name.partition("/")[0] != without:
            (folder / name).parent.mkdir(exist_ok=True)
            copy(str(source / name), str(folder / name))


def _save_adapter(
    document: Mapping[str, Any],
    weights: TrainedWeights,
    folder: Path,
    grid: Path | None,
    on_tensor: Callable[[int], None],
) -> None:
    network, lora = document["network"], LoraConfig(**document["base"]["lora"])
    component = network_component(network["_class_name"])
    folder.mkdir(parents=True, exist_ok=True)
    named = ((name.partition(".")[2], tensor) for name, tensor in weights.tensors)
    layout = {name.partition(".")[2]: spec for name, spec in weights.layout.items()}
    names = dict(zip(layout, file_names(layout), strict=True))
    write_adapter(
        folder,
        component,
        network["_class_name"],
        {names[name]: spec for name, spec in layout.items()},
        scaled(lora, named),
        peft_format=not loads_adapters(document["index"]["_class_name"]),
    )
    on_tensor(sum(spec.bytes for spec in layout.values()))
    if grid is not None:
        shutil.copyfile(grid, folder / GRID_FILE)
    write_atomic(folder / CARD_FILE, _card(document, weights, has_grid=grid is not None).encode())


def _by_component(layout: Layout) -> dict[str, dict[str, TensorSpec]]:
    """Split ``network.…`` and ``text_encoder.…``; the results' names lack these prefixes."""
    components: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in layout.items():
        component, _, own = name.partition(".")
        components.setdefault(component, {})[own] = spec
    return components


def _card(document: Mapping[str, Any], weights: TrainedWeights, *, has_grid: bool) -> str:
    index = document["index"]
    class_name = index["_class_name"]
    # Diffusers opens a Stable Diffusion 3 without T5 only if the caller says so.
    standard = isinstance(class_name, str)
    third = ("text_encoder_3", "tokenizer_3") if standard else ()
    absent = [name for name in third if index.get(name) == [None, None]]
    return model_card(
        TrainingRecord.parse(document["record"]),
        pipeline_class=class_name if standard else class_name[1],
        standard=standard,
        absent=absent,
        step=weights.step,
        weights=weights.kind,
        has_grid=has_grid,
        adapter=_adapter_usage(document) if is_adapter(next(iter(weights.layout))) else None,
    )


def _adapter_usage(document: Mapping[str, Any]) -> str:
    """Return the line of Python that adds the adapter in ``folder`` to ``pipeline``."""
    if loads_adapters(document["index"]["_class_name"]):
        return "pipeline.load_lora_weights(folder)"
    component = network_component(document["network"]["_class_name"])
    loaded = f"peft.PeftModel.from_pretrained(pipeline.{component}, folder)"
    return f"pipeline.{component} = {loaded}.merge_and_unload()"


def share_model(components_folder: Path, model: Path, folder: Path) -> None:
    """Copy what :func:`save_model` wrote to ``folder``, where no file is overwritten in place.

    Frozen components become hard links to those of ``components_folder`` where the file system
    allows: they take no time and no space.
    """
    frozen = _read_manifest(components_folder)["files"]

    def link_or_copy(source: str, target: str) -> None:
        Path(target).unlink(missing_ok=True)
        name = Path(source).relative_to(model).as_posix()
        if name in frozen:
            with contextlib.suppress(OSError):
                os.link(components_folder / name, target)
                return
        shutil.copy2(source, target)

    shutil.copytree(model, folder, copy_function=link_or_copy, dirs_exist_ok=True)


def _write_json(document: Mapping[str, Any], path: Path) -> None:
    write_atomic(path, (json.dumps(document, indent=2) + "\n").encode())


def _frozen_components(parts: ModelComponents) -> dict[str, Any]:
    trained = [*parts.trained_module().children()]
    named = parts.named_components()
    return {name: component for name, component in named.items() if component not in trained}


def _save_frozen(
    frozen: Mapping[str, Any], source: Path | None, folder: Path
) -> tuple[dict[str, Any], dict[str, int]]:
    """Save components, each file atomically; return their index, and the sizes of the files."""
    _disable_progress_bars()
    staging = folder / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    with _stored_precision(frozen, source):
        TextToImagePipeline(**frozen).save_pretrained(staging)
    index: dict[str, Any] = json.loads((staging / INDEX_FILE).read_text(encoding="utf-8"))
    (staging / INDEX_FILE).unlink()
    for path in staging.glob("*/config.json"):
        _complete_config(path)
    files = {}
    for path in sorted(staging.rglob("*")):
        target = folder / path.relative_to(staging)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif not path.match(UPLOAD_NOTES):
            path.replace(target)
            files[target.relative_to(folder).as_posix()] = target.stat().st_size
    # SageMaker may be adding a note on an upload.
    shutil.rmtree(staging, ignore_errors=True)
    return index, files


def _complete_config(path: Path) -> None:
    """Write what diffusers' pipelines need in a component's configuration.

    Transformers 5 loads a text encoder in the precision that its configuration names, unless a
    caller names one, and the pipelines fail if that is not the network's. The files may store half
    precision: the conversion to fp32 is exact. Stable Diffusion 3's pipeline adds the autoencoder's
    ``shift_factor``, which may be null.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    changes: dict[str, Any] = {}
    if "dtype" in config:
        changes["dtype"] = "float32"
    if "shift_factor" in config and config["shift_factor"] is None:
        changes["shift_factor"] = 0.0
    if changes:
        _write_json(config | changes, path)


@contextlib.contextmanager
def _stored_precision(frozen: Mapping[str, Any], source: Path | None) -> Iterator[None]:
    """Convert modules to the precision of their files inside the context.

    They are fp32 before and after. The conversion is exact, as their values come from the files.
    """
    modules = {
        name: component for name, component in frozen.items() if isinstance(component, nn.Module)
    }
    for name, module in modules.items():
        # Not the method of diffusers' models, which warns of any conversion.
        nn.Module.to(module, torch.float32 if source is None else _weights_dtype(source / name))
    try:
        yield
    finally:
        for module in modules.values():
            nn.Module.to(module, torch.float32)


def _weights_dtype(folder: Path) -> torch.dtype:
    """Return the precision of a component's stored weights; fp32 if it is mixed or unknown."""
    found = {
        entry.dtype
        for path in folder.glob("*.safetensors")
        for entry in read_file_header(path).tensors.values()
    }
    [name] = found if len(found) == 1 else ["F32"]
    return torch_type(name) if name in _HALF_PRECISIONS else torch.float32


def _save_text_config(parts: ModelComponents, folder: Path) -> None:
    """Save the configuration of the trained text encoder."""
    [encoder] = parts.text_encoders.encoders
    encoder.config.architectures = [_class_name(encoder)]
    encoder.config.save_pretrained(folder / "text_encoder")


def _class_name(module: Any) -> str:
    """Return the class name without the prefix that FSDP2 adds."""
    return type(module).__name__.removeprefix("FSDP")


def load_model(folder: Path) -> TextToImagePipeline:
    """Load a model that :func:`save_model` wrote, without running the code in its folder."""
    network = network_folder(folder)
    assert network is not None
    return _load_pipeline(folder, {network.name: _load(network, "config.json", NETWORKS)})


def load_with_weights(folder: Path, weights: Mapping[str, Tensor]) -> TextToImagePipeline:
    """Load a components folder's pipeline with trained ``weights``, an adapter merged.

    Their names are those of :meth:`ModelComponents.trained_module`, without the prefix in a
    :func:`~sm_train.entrypoints.models.lora.scaled` adapter.

    Raises:
        RuntimeError: the weights belong to another model.
    """
    document = _read_manifest(folder)
    config = document["network"]
    if document.get("base"):
        network = _merged_network(folder, document["base"], _adapter(document["base"], weights))
        return _load_pipeline(folder, {network.component: network.module.eval()})
    network = Network(config | {"class": config["_class_name"]}, None, config["sample_size"])
    network.allocate(torch.device("cpu"))
    network.module.load_state_dict(_strip_prefix("network.", weights))
    pipeline = _load_pipeline(folder, {network.component: network.module.eval()})
    if text_encoder := _strip_prefix("text_encoder.", weights):
        pipeline.text_encoder.load_state_dict(text_encoder)
    return pipeline


def _adapter(base: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scaled adapter among trained weights, which may be scaled already."""
    trained = _strip_prefix("network.", weights)
    return dict(scaled(LoraConfig(**base["lora"]), trained.items())) if trained else dict(weights)


def _merged_network(
    folder: Path, base: Mapping[str, Any], adapter: Mapping[str, Tensor]
) -> Network:
    """Load the frozen network of a components folder and add a scaled adapter to its weights.

    Raises:
        RuntimeError: they do not belong together, or the network's files are missing.
    """
    source = None if base["random"] else network_folder(folder)
    if source is None and not base["random"]:
        raise RuntimeError(f"{folder}: has no network")
    network = Network(base["config"], source, base["side"], adapted=True)
    network.materialize(torch.device("cpu"), base["seed"])
    merge(network.module, adapter)
    return network


def merged_weights(folder: Path, weights: TrainedWeights) -> TrainedWeights:
    """Return the weights of the whole network with its adapter, in memory.

    Raises:
        RuntimeError: the weights belong to another model.
    """
    base = _read_manifest(folder)["base"]
    tensors = _merged_network(
        folder, base, _adapter(base, dict(weights.tensors))
    ).module.state_dict()
    named = {f"network.{name}": tensor for name, tensor in tensors.items()}
    layout = {name: TensorSpec.of(tensor) for name, tensor in named.items()}
    return TrainedWeights(named.items(), layout, weights.step, weights.kind)


def _strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with ``prefix``, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _load_pipeline(folder: Path, network: Mapping[str, Any]) -> TextToImagePipeline:
    _disable_progress_bars()
    text_encoders = load_text_encoders(folder, allow_missing_weights=is_components_folder(folder))
    assert text_encoders is not None
    scheduler = _load(folder / "scheduler", "scheduler_config.json", INFERENCE_SCHEDULERS)
    vae = None
    if (folder / "vae").is_dir():
        vae = load_autoencoder(folder / "vae")
    named = text_encoders.named_components()
    return TextToImagePipeline(scheduler=scheduler, vae=vae, **network, **named)


def _load(folder: Path, config: str, known: tuple[str, ...]) -> Any:
    """Load a component by the class that its configuration names, if ``known`` lists it."""
    import diffusers

    class_name = json.loads((folder / config).read_text(encoding="utf-8")).get("_class_name")
    if class_name not in known:
        raise ValueError(f"{folder.name} is a {class_name}, none of {', '.join(known)}")
    component = getattr(diffusers, class_name)
    options = {} if config == "scheduler_config.json" else {"use_safetensors": True}
    return component.from_pretrained(folder, local_files_only=True, **options)


def _disable_progress_bars() -> None:
    """Disable the bars that loading and saving would print to logs and terminals."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()

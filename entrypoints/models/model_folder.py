"""Which files of a folder are its model, and whether they can be opened without running its code.

`sample` and `export` apply the same rules: only classes that sm-train trains, weights in
safetensors, no code, and no link that leads out of the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError
from sm_train.entrypoints.models import pipeline as pipeline_module
from sm_train.entrypoints.models.builder import TEXT_ENCODERS
from sm_train.entrypoints.models.component_files import (
    PICKLES,
    ComponentFileError,
    LocalComponents,
    read_header,
    read_json,
    weight_files,
)
from sm_train.entrypoints.models.model_card import CARD_FILE, GRID_FILE
from sm_train.entrypoints.models.objectives import INFERENCE_SCHEDULERS
from sm_train.entrypoints.models.trained_network import NETWORKS

INDEX_FILE, PIPELINE_FILE = "model_index.json", "pipeline.py"
_ADAPTER_CONFIG = "adapter_config.json"
_TOP_LEVEL = frozenset({INDEX_FILE, PIPELINE_FILE, CARD_FILE, GRID_FILE, _ADAPTER_CONFIG})
_LICENSES = ("LICENSE", "NOTICE")
_WEIGHTS = ".safetensors"
_COMPONENT_SUFFIXES = (_WEIGHTS, ".json", ".txt", ".model")
"""Weights, configurations, and the vocabularies of tokenizers."""

_CLASSES = {
    "unet": NETWORKS,
    "transformer": NETWORKS,
    "vae": ("AutoencoderKL",),
    "scheduler": INFERENCE_SCHEDULERS,
}
_LIBRARIES = (None, "diffusers", "transformers")


def model_files(folder: Path) -> list[str]:
    """Return the files of a model, an adapter or a components folder, relative to it.

    Others, such as pickles next to safetensors, are not part of it.

    Raises:
        CheckpointError: a file is a link that leads out of the folder.
    """
    names = sorted(name for name in LocalComponents(folder).files if _is_model_file(name))
    for name in names:
        if not _stays_inside(folder / name, folder.resolve()):
            raise CheckpointError(
                f"{folder / name}: links to a file outside of the model's folder; copy the file "
                "into it"
            )
    return names


def _is_model_file(name: str) -> bool:
    path = PurePosixPath(name)
    if len(path.parts) == 1:
        return name in _TOP_LEVEL or name.startswith(_LICENSES) or name.endswith(_WEIGHTS)
    return len(path.parts) == 2 and name.endswith(_COMPONENT_SUFFIXES) and not name.startswith(".")


def _stays_inside(path: Path, root: Path) -> bool:
    """Return whether ``path`` leads to a file below ``root``, or of the Hub's cache that holds it.

    The cache consists of links from ``snapshots/REVISION`` to ``blobs``.
    """
    target = path.resolve()
    if target.is_relative_to(root):
        return True
    return root.parent.name == "snapshots" and target.is_relative_to(root.parents[1] / "blobs")


def require_loadable(folder: Path) -> None:
    """Refuse a model folder that cannot be opened without running code from it.

    Raises:
        CheckpointError: it cannot, a header of weights is damaged, or a link leads out of it.
    """
    names = model_files(folder)
    reader = LocalComponents(folder)
    try:
        problem = next(_problems(reader, names), None)
        for name in names:
            if name.endswith(_WEIGHTS):
                read_header(reader, name)  # diffusers takes the last one of two equal names
    except ComponentFileError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from None
    if problem is not None:
        raise CheckpointError(f"{folder}: cannot be read: {problem}")


def _problems(reader: LocalComponents, names: Iterable[str]) -> Iterator[str]:
    if PIPELINE_FILE in names and not _is_own_pipeline(reader.folder / PIPELINE_FILE):
        yield f"{PIPELINE_FILE} holds code that sm-train did not write"
    if INDEX_FILE in names:
        yield from _index_problems(read_json(reader, INDEX_FILE))
    for name in names:
        if name.endswith(".json") and "auto_map" in _document(reader, name):
            yield f"{name}: auto_map names code in the folder, which sm-train does not run"
    components = {name.partition("/")[0] for name in reader.files if "/" in name}
    for component in sorted(components):
        yield from _component_problems(reader, component)


def _is_own_pipeline(path: Path) -> bool:
    return path.read_bytes() == Path(pipeline_module.__file__).read_bytes()


def _index_problems(index: Mapping[str, Any]) -> Iterator[str]:
    for component, entry in index.items():
        is_component = isinstance(entry, list) and component != "_class_name"
        if is_component and entry[0] not in _LIBRARIES:
            yield (
                f"{INDEX_FILE}: {component} is a class of {entry[0]}, not of diffusers or "
                "Transformers"
            )


def _document(reader: LocalComponents, name: str) -> Mapping[str, Any]:
    """Return a JSON object; empty for a vocabulary, which may be a list."""
    try:
        return read_json(reader, name)
    except ComponentFileError:
        return {}


def _component_problems(reader: LocalComponents, component: str) -> Iterator[str]:
    """Check the class of a component, and that its weights are no pickle."""
    is_text = component.startswith("text_encoder")
    config = f"{component}/config.json"
    if component == "scheduler":
        config = f"{component}/scheduler_config.json"
    if config in reader.files and (is_text or component in _CLASSES):
        document = read_json(reader, config)
        [found, *_] = document.get("architectures") or [document.get("_class_name")]
        known = TEXT_ENCODERS if is_text else _CLASSES[component]
        if found not in known:
            yield f"{component} is a {found}, none of {', '.join(known)}"
    pickles = [name for name in reader.files if name.startswith(f"{component}/")]
    if any(name.endswith(PICKLES) for name in pickles):
        weight_files(reader, component)

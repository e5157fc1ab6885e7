"""Presets and model folders in diffusers' layout: read without weights, compared with the run file.

``sm-train check`` and the training job compare them with the same function: on headers of
safetensors files and JSON alone, without PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm_train.cost.speed_model import BF16_PRECISIONS
from sm_train.entrypoints.job_interface.job_config import JobConfigError, ModelConfig
from sm_train.entrypoints.models.component_files import (
    ComponentFileError,
    ComponentReader,
    LocalComponents,
    frozen_identities,
    has_component,
    manifest_problems,
    numbered_component,
    read_json,
    read_shapes,
)
from sm_train.entrypoints.models.noise_settings import (
    SCHEDULER_CONFIG,
    ContradictionError,
    noise_settings,
)

PRESETS = Path(__file__).parent / "presets"

UNLIMITED_TOKENS = 256
"""Tokens of a caption for a T5 (:data:`sm_train.entrypoints.models.pipeline.T5_TOKENS`)."""


class ComponentsError(ValueError):
    """A components folder cannot be used; the message is one line."""


def preset_names() -> list[str]:
    """Return the names of the shipped presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def preset_caption_tokens(preset: Mapping[str, Any]) -> int:
    """Return the length of a caption's hidden states.

    CLIP's states are joined along the width; a T5's tokens follow them.
    """
    encoders = preset["text_encoders"]
    clip = [
        encoder["max_position_embeddings"]
        for encoder in encoders
        if "max_position_embeddings" in encoder
    ]
    return max(clip, default=0) + UNLIMITED_TOKENS * (len(encoders) - len(clip))


def read_preset(name: str, content: str | None = None) -> dict[str, Any]:
    """Return the preset called ``name``, with shared component configurations filled in.

    ``content`` is the JSON of a preset that does not ship with sm-train.

    Raises:
        JobConfigError: there is no such preset.
    """
    path = PRESETS / f"{name}.json"
    if content is None and not path.is_file():
        raise JobConfigError(f"model.preset: {name!r} is not one of {', '.join(preset_names())}")
    preset: dict[str, Any] = json.loads(content or path.read_text(encoding="utf-8"))
    preset["vae"] = _resolve_shared(preset["vae"])
    preset["text_encoders"] = [_resolve_shared(encoder) for encoder in preset["text_encoders"]]
    return preset


def _resolve_shared(component: Any) -> Any:
    """Replace the name of a shared configuration by its content."""
    if not isinstance(component, str):
        return component
    return json.loads((PRESETS / "parts" / f"{component}.json").read_text(encoding="utf-8"))


def downsampling(vae: Mapping[str, Any] | None) -> int:
    """Return the pixels of an image's side per latent pixel; 1 without an autoencoder."""
    return 1 if vae is None else int(2 ** (len(vae["block_out_channels"]) - 1))


def encodes_in_fp32(vae: Mapping[str, Any], precision: str, vae_precision: str) -> bool:
    """Return whether an autoencoder of this configuration encodes in fp32.

    ``precision`` and ``vae_precision`` are the run file's. Diffusers' force_upcast (true unless the
    configuration says otherwise) marks autoencoders that need fp32.
    """
    if vae_precision == "auto":
        return precision not in BF16_PRECISIONS or bool(vae.get("force_upcast", True))
    return vae_precision == "fp32"


def component_files(folder: Path) -> Iterator[Path]:
    """Yield the files of frozen components; skip everything else in ``folder``."""
    for pattern in ("vae", "text_encoder*", "tokenizer*"):
        for component in sorted(folder.glob(pattern)):
            yield from (path for path in sorted(component.rglob("*")) if path.is_file())


def describe_latents(folder: Path, resolution: int) -> dict[str, Any]:
    """Return an index's description of latents: resolution, shapes, and identities of components.

    Raises:
        ComponentsError: the folder holds no components, or the resolution does not fit them.
    """
    vae = _read(folder / "vae" / "config.json")
    factor = downsampling(vae)
    if resolution % factor:
        raise ComponentsError(f"resolution: {resolution} must be a multiple of {factor}")
    text, pooled = _text_shapes(folder)
    reader = LocalComponents(folder)
    try:
        identities = frozen_identities(reader)
    except ComponentFileError as error:
        raise ComponentsError(f"{folder}: {error}") from None
    latents = {
        "resolution": resolution,
        "moments": [2 * vae["latent_channels"], resolution // factor, resolution // factor],
        "text": text,
        "sizes": [4],
        "model": identities,
    }
    return latents | ({"pooled": pooled} if pooled else {})


def _text_shapes(folder: Path) -> tuple[list[int], list[int]]:
    """Return the shapes of a caption's hidden states and pooled projections.

    They are those of :func:`sm_train.entrypoints.models.pipeline.encode`: CLIP states are joined
    along the width, T5 states along the length.
    """
    clip_width = clip_tokens = t5_width = t5_tokens = pooled_width = index = 0
    while index == 0 or (folder / numbered_component("text_encoder", index)).is_dir():
        encoder = _read(folder / numbered_component("text_encoder", index) / "config.json")
        tokenizer = _read(folder / numbered_component("tokenizer", index) / "tokenizer_config.json")
        positions = encoder.get("max_position_embeddings", UNLIMITED_TOKENS)
        tokens = min(positions, int(tokenizer.get("model_max_length", 10**9)))
        if encoder.get("model_type") == "t5":
            t5_width, t5_tokens = encoder["d_model"], tokens
        else:
            clip_width, clip_tokens = clip_width + encoder["hidden_size"], tokens
            if "CLIPTextModelWithProjection" in encoder.get("architectures", ()):
                pooled_width += encoder["projection_dim"]
        index += 1
    states = [clip_tokens + t5_tokens, max(clip_width, t5_width)]
    return states, [pooled_width] if pooled_width else []


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise ComponentsError(
            f"{path.parent.parent}: not a components folder: no readable "
            f"{path.parent.name}/{path.name}"
        ) from None
    return document


TRANSFORMER, UNET = "transformer", "unet"
"""Folder names of a network in diffusers' layout."""

_PIXART, _SD3 = "PixArtTransformer2DModel", "SD3Transformer2DModel"
_LEGACY_PIXART = ("Transformer2DModel", "ada_norm_single")
"""Class and norm_type under which PixArt was published, before it had a class of its own."""

_FREE_KEYS = {
    "class",
    # Buffers and image sizes, which training resizes.
    "sample_size",
    "pos_embed_max_size",
    "interpolation_scale",
    # The network's inputs follow the folder's configuration.
    "use_additional_conditions",
}
"""Keys of a preset's network that may differ from those of a pretrained one."""

_DEFAULTS = {
    "use_linear_projection": False,
    "addition_embed_type": None,
    "norm_num_groups": 32,
    "layers_per_block": 2,
    "qk_norm": None,
}
"""Diffusers' values of keys that older configurations lack."""


def component_problems(
    reader: ComponentReader, preset: Mapping[str, Any], model: ModelConfig
) -> list[str]:
    """Return what is wrong with a components folder: one line each, with the fix."""
    checks: list[Callable[[ComponentReader, Mapping[str, Any]], Iterator[str]]] = [
        lambda reader, _: manifest_problems(reader),
        _listed_component_problems,
        _vae_problems,
        _text_problems,
        _network_problems,
    ]
    names = (UNET, TRANSFORMER, "vae", "text_encoder")
    if not any(has_component(reader, name) for name in names):
        return [
            "holds no unet, transformer, vae or text_encoder; give a model folder in diffusers' "
            "layout"
        ]
    problems: list[str] = []
    for check in checks:
        try:
            problems += check(reader, preset)
        except ComponentFileError as error:
            problems.append(str(error))
    try:
        scheduler = pretrained_scheduler(reader)
        noise_settings(preset, model, scheduler)
    except (ContradictionError, ComponentFileError) as error:
        problems.append(str(error))
    else:
        problems += _unknown_target_problems(reader, preset, model, scheduler)
    return list(dict.fromkeys(problems))


def pretrained_scheduler(reader: ComponentReader) -> dict[str, Any] | None:
    """Return the scheduler's configuration of a folder with a network; None without either.

    Raises:
        ComponentFileError: the file is damaged.
    """
    if _network_component(reader) is None or SCHEDULER_CONFIG not in reader.files:
        return None
    return read_json(reader, SCHEDULER_CONFIG)


def _network_component(reader: ComponentReader) -> str | None:
    """Return the folder name of the network; None without one."""
    return next((name for name in (TRANSFORMER, UNET) if has_component(reader, name)), None)


def _unknown_target_problems(
    reader: ComponentReader,
    preset: Mapping[str, Any],
    model: ModelConfig,
    scheduler: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Yield whether nothing says what a pretrained network predicts; an SD3 only learns a flow."""
    component = _network_component(reader)
    is_known = preset["network"]["class"] == _SD3 or model.prediction_type is not None
    if component is not None and scheduler is None and not is_known:
        yield (
            f"{SCHEDULER_CONFIG} is missing, which says what {component} learned to predict; copy "
            "it from the same model, or set model.prediction_type"
        )


def _listed_component_problems(reader: ComponentReader, preset: Mapping[str, Any]) -> Iterator[str]:
    """Yield components that ``model_index.json`` lists and the folder lacks, if they are used."""
    if "model_index.json" not in reader.files:
        return
    index = read_json(reader, "model_index.json")
    used = {UNET, TRANSFORMER, "vae", "scheduler"}
    for number in range(len(preset["text_encoders"])):
        used |= {numbered_component("text_encoder", number)}
    for name, entry in index.items():
        is_present = isinstance(entry, list) and entry and entry[0] is not None
        if name in used and is_present and not has_component(reader, name):
            yield f"{name}/ is missing, and model_index.json lists it; copy the model again"


def _vae_problems(reader: ComponentReader, preset: Mapping[str, Any]) -> Iterator[str]:
    if preset["vae"] is None or not has_component(reader, "vae"):
        return
    config = read_json(reader, "vae/config.json")
    if config.get("_class_name") not in (None, preset["vae"]["class"]):
        yield (
            f"vae: is a {config['_class_name']}, and the preset needs {preset['vae']['class']}; "
            "use other components"
        )
        return
    channels, needed = config.get("latent_channels", 4), preset["network"]["in_channels"]
    if channels != needed:
        yield (
            f"vae: has {channels} latent channels, and the preset's network {needed}; use another "
            "preset or other components"
        )
    # Without the key diffusers builds one block, which keeps the size.
    factor = downsampling({"block_out_channels": (64,)} | config)
    if factor != downsampling(preset["vae"]):
        yield (
            f"vae: divides the image's sides by {factor}, and the preset's by "
            f"{downsampling(preset['vae'])}; use another preset or other components"
        )
    read_shapes(reader, "vae")


def _text_problems(reader: ComponentReader, preset: Mapping[str, Any]) -> Iterator[str]:
    expected = preset["text_encoders"]
    present = [
        name
        for number in range(4)
        if has_component(reader, name := numbered_component("text_encoder", number))
    ]
    if not present or preset["train_text_encoder"]:
        return
    optional = 2 if preset["network"]["class"] == _SD3 else len(expected)
    for number in range(max(len(expected), len(present))):
        name = numbered_component("text_encoder", number)
        if number >= len(expected):
            yield (
                f"{name}: the preset has {len(expected)} text encoders; use another preset, or "
                f"remove {name}/"
            )
        elif name in present:
            yield from _encoder_problems(reader, number, expected[number])
        elif number < optional:
            yield (
                f"{name}/ is missing: the preset needs {len(expected)} text encoders; copy the "
                "model again, or use another preset"
            )


def _encoder_problems(
    reader: ComponentReader, number: int, expected: Mapping[str, Any]
) -> Iterator[str]:
    name = numbered_component("text_encoder", number)
    config = read_json(reader, f"{name}/config.json")
    found = _architecture(config)
    if found != expected["class"]:
        yield (
            f"{name}: is a {found}, and the preset needs {expected['class']}; use another preset "
            "or other components"
        )
        return
    key = "d_model" if "d_model" in expected else "hidden_size"
    if config.get(key) != expected[key]:
        yield (
            f"{name}: has {key} {config.get(key)}, and the preset {expected[key]}; use another "
            "preset or other components"
        )
    yield from _tokenizer_problems(reader, numbered_component("tokenizer", number), name)
    read_shapes(reader, name)


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the first class that a text encoder's configuration names."""
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else "nothing"


_VOCABULARIES = (
    {"tokenizer.json"},
    {"vocab.json", "merges.txt"},
)
"""Sets of files, each of which is enough for a tokenizer of CLIP or T5."""
_SENTENCEPIECE = ("spiece.model", "tokenizer.model")
"""Vocabularies that transformers converts by sentencepiece and a matching protobuf. A job has
neither: the compiled messages of each release of sentencepiece need a protobuf at least as new as
theirs, and images bring their own."""


def _tokenizer_problems(reader: ComponentReader, tokenizer: str, encoder: str) -> Iterator[str]:
    if not has_component(reader, tokenizer):
        yield (
            f"{tokenizer}/ is missing: captions of {encoder} need the tokenizer that it was "
            "trained with; copy it from the same model"
        )
        return
    config_file = f"{tokenizer}/tokenizer_config.json"
    config = read_json(reader, config_file) if config_file in reader.files else {}
    if str(config.get("tokenizer_class")).startswith("ByT5"):
        # Its tokens are bytes.
        return
    found = {path.removeprefix(f"{tokenizer}/") for path in reader.files}
    if any(files <= found for files in _VOCABULARIES):
        return
    sentencepiece = next((name for name in _SENTENCEPIECE if name in found), None)
    if sentencepiece is None:
        yield (
            f"{tokenizer}/ has no vocabulary (tokenizer.json, or vocab.json with merges.txt); copy "
            "it from the same model"
        )
        return
    yield (
        f"{tokenizer}/ has {sentencepiece} and no tokenizer.json, and a job has no sentencepiece "
        "to convert it; convert it once: pip install transformers sentencepiece protobuf; "
        f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{tokenizer}')"
        f".save_pretrained('{tokenizer}')\""
    )


def _network_problems(reader: ComponentReader, preset: Mapping[str, Any]) -> Iterator[str]:
    component = _network_component(reader)
    if component is None:
        return
    config, expected = read_json(reader, f"{component}/config.json"), preset["network"]
    class_name = network_class(config)
    if class_name != expected["class"]:
        yield (
            f"{component}: is a {class_name}, and the preset's network a {expected['class']}; use "
            "another preset or other components"
        )
        return
    differences = [
        f"{key} {config.get(key, _DEFAULTS.get(key))} instead of {value}"
        for key, value in expected.items()
        if key not in _FREE_KEYS and not _same(key, config, value, expected)
    ]
    if differences:
        listed = ", ".join(differences[:3])
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        yield (
            f"{component}: is not the preset's network: {listed}{more}; use another preset or "
            "other components"
        )
    read_shapes(reader, component)


def _same(key: str, config: Mapping[str, Any], value: object, expected: Mapping[str, Any]) -> bool:
    """Return whether a network's configuration agrees with the preset's ``value`` of ``key``."""
    found = config.get(key, _DEFAULTS.get(key))
    if key == "out_channels" and expected["class"] == _PIXART:
        return found in (value, 2 * expected["in_channels"])
    if key == "attention_head_dim" and expected["class"].startswith("UNet"):
        # U-Nets name the number of heads by it; num_attention_heads has precedence.
        found = config.get("num_attention_heads") or found
    return _widened(found, value) == _widened(value, found)


def _widened(value: object, other: object) -> object:
    """Repeat a number that stands for every block as often as ``other`` lists it."""
    if isinstance(value, (int, float)) and isinstance(other, Sequence):
        return [value] * len(other)
    return list(value) if isinstance(value, tuple) else value


def network_class(config: Mapping[str, Any]) -> str:
    """Return the class of a network's configuration; PixArt was published under an older one."""
    name = str(config.get("_class_name"))
    if (name, config.get("norm_type")) == _LEGACY_PIXART:
        return _PIXART
    return name


def learned_sigma(config: Mapping[str, Any]) -> bool:
    """Return whether a network also predicts the variance, in the second half of its channels.

    Published PixArt models do; training uses the mean, as samplers such as DPM-Solver do.
    """
    is_pixart = network_class(config) == _PIXART
    return is_pixart and config.get("out_channels") == 2 * config.get("in_channels", 4)

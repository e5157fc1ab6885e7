"""Compare pretrained components with the run file, before money is spent.

``sm-train check`` and the training job use the same function: on headers of safetensors files and
JSON alone, without PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.common.job_config import ModelConfig
from sm_train.entrypoints.models.component_files import (
    ComponentFileError,
    ComponentReader,
    has_component,
    read_json,
    read_shapes,
)
from sm_train.entrypoints.models.components import numbered_component
from sm_train.entrypoints.models.model_manifest import manifest_problems

SCHEDULER_CONFIG = "scheduler/scheduler_config.json"

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

_SCHEDULE_KEYS = (
    "num_train_timesteps",
    "beta_schedule",
    "beta_start",
    "beta_end",
    "trained_betas",
    "clip_sample",
)
"""Keys of a scheduler's configuration that define the noise levels."""


@dataclass(frozen=True)
class NoiseSettings:
    """What the network learns: from the run file, the pretrained scheduler or the preset.

    ``schedule`` holds the arguments of diffusers' scheduler, empty for a flow. ``shift`` is None
    for the default of the resolution.
    """

    prediction_type: str
    schedule: Mapping[str, Any]
    zero_terminal_snr: bool
    shift: float | None


class ContradictionError(ValueError):
    """The run file contradicts the pretrained model; the message is one line with the fix."""


def noise_settings(
    preset: Mapping[str, Any], model: ModelConfig, scheduler: Mapping[str, Any] | None
) -> NoiseSettings:
    """Return what to train; ``scheduler`` is the configuration of a pretrained network's.

    Raises:
        ContradictionError: the run file or the preset contradicts the scheduler.
    """
    if scheduler is None:
        return NoiseSettings(
            model.prediction_type or preset["prediction_type"],
            preset.get("diffusion", {}),
            bool(model.zero_terminal_snr),
            model.timestep_shift,
        )
    prediction_type = _prediction_type(scheduler)
    _require_equal("prediction_type", model.prediction_type, prediction_type)
    _require_supported(preset, prediction_type)
    if prediction_type == "flow":
        return _flow_settings(model, scheduler)
    zero_snr = scheduler.get("rescale_betas_zero_snr")
    _require_equal("zero_terminal_snr", model.zero_terminal_snr, zero_snr)
    zero_terminal_snr = bool(model.zero_terminal_snr or zero_snr)
    if zero_terminal_snr and prediction_type == "epsilon":
        raise ContradictionError(
            "model.zero_terminal_snr: needs v_prediction, and the pretrained model predicts "
            "epsilon; remove it or use other components"
        )
    if zero_terminal_snr and model.min_snr_gamma is not None:
        raise ContradictionError(
            "model.min_snr_gamma: the pretrained model has zero terminal SNR, whose last timestep "
            "would get the weight 0; remove min_snr_gamma"
        )
    known = {key: scheduler[key] for key in _SCHEDULE_KEYS if scheduler.get(key) is not None}
    schedule = {**preset["diffusion"], **_SCHEDULER_DEFAULTS, **known}
    return NoiseSettings(prediction_type, schedule, zero_terminal_snr, None)


_SCHEDULER_DEFAULTS = {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02}
"""Diffusers' values of keys that a scheduler's configuration lacks."""


def _prediction_type(scheduler: Mapping[str, Any]) -> str:
    if str(scheduler.get("_class_name", "")).startswith("FlowMatch"):
        return "flow"
    return str(scheduler.get("prediction_type", "epsilon"))


def _require_supported(preset: Mapping[str, Any], prediction_type: str) -> None:
    diffusion = ("v_prediction", "epsilon") if "diffusion" in preset else ()
    supported = {preset["prediction_type"], *diffusion}
    if prediction_type not in supported:
        raise ContradictionError(
            f"model.preset: the pretrained model predicts {prediction_type}, and the preset "
            f"supports {' or '.join(sorted(supported))}; use another preset or other components"
        )


def _require_equal(key: str, wanted: object, stored: object) -> None:
    """Refuse a run file's value that differs from the scheduler's; None is not stated."""
    if wanted is not None and stored is not None and wanted != stored:
        raise ContradictionError(
            f"model.{key}: the run file says {_yaml(wanted)}, and the pretrained model's "
            f"{SCHEDULER_CONFIG} {_yaml(stored)}; remove it from the run file, or use other "
            "components"
        )


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flow_settings(model: ModelConfig, scheduler: Mapping[str, Any]) -> NoiseSettings:
    if scheduler.get("use_dynamic_shifting"):
        raise ContradictionError(
            "model.components: the pretrained scheduler uses use_dynamic_shifting, which is not "
            "supported; use other components"
        )
    shift = float(scheduler.get("shift", 1.0))
    _require_equal("timestep_shift", model.timestep_shift, shift)
    return NoiseSettings("flow", {}, False, shift)


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
        noise_settings(preset, model, pretrained_scheduler(reader))
    except (ContradictionError, ComponentFileError) as error:
        problems.append(str(error))
    return list(dict.fromkeys(problems))


def pretrained_scheduler(reader: ComponentReader) -> dict[str, Any] | None:
    """Return the scheduler's configuration of a folder with a network; None without either.

    Raises:
        ComponentFileError: the file is damaged.
    """
    has_network = has_component(reader, UNET) or has_component(reader, TRANSFORMER)
    if not has_network or SCHEDULER_CONFIG not in reader.files:
        return None
    return read_json(reader, SCHEDULER_CONFIG)


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
    [found, *_] = config.get("architectures") or ["nothing"]
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
    tokenizer = numbered_component("tokenizer", number)
    if not has_component(reader, tokenizer):
        yield (
            f"{tokenizer}/ is missing: captions of {name} need the tokenizer that it was trained "
            "with; copy it from the same model"
        )
    read_shapes(reader, name)


def _network_problems(reader: ComponentReader, preset: Mapping[str, Any]) -> Iterator[str]:
    component = next((name for name in (TRANSFORMER, UNET) if has_component(reader, name)), None)
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
        return found in (value, 2 * config["in_channels"])
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
    return is_pixart and config.get("out_channels") == 2 * config["in_channels"]

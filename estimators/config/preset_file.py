"""Custom model presets: files of the user in the form of those that ship with sm-train.

A preset names the classes that the training code knows with their arguments. The arguments' names
and types, ``data/preset_arguments.json``, are those of diffusers and transformers, so that a laptop
without PyTorch finds a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from sm_train.estimators.config.presets import shared_parts

NETWORKS = ("UNet2DConditionModel", "PixArtTransformer2DModel", "SD3Transformer2DModel")
TEXT_ENCODERS = ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel")

_AUTOENCODER = "AutoencoderKL"
_PREDICTIONS = {
    "UNet2DConditionModel": ("epsilon", "v_prediction"),
    "PixArtTransformer2DModel": ("flow", "epsilon", "v_prediction"),
    "SD3Transformer2DModel": ("flow",),
}
_REQUIRED = ("network", "prediction_type", "vae", "text_encoders")
_KEYS = (*_REQUIRED, "diffusion", "train_text_encoder")
_DIFFUSION = {
    "num_train_timesteps": "int",
    "beta_schedule": "str",
    "beta_start": "float",
    "beta_end": "float",
    "clip_sample": "bool",
}
_MAX_BYTES = 2**20


class PresetFileError(ValueError):
    """A preset file cannot be used; the message is one line that names the key."""


def is_preset_file(preset: str) -> bool:
    """Return whether ``model.preset`` names a file and not a shipped preset."""
    return preset.endswith(".json")


def read_preset_file(path: Path) -> str:
    """Return the content of a preset file as canonical JSON.

    Raises:
        PresetFileError: the file is missing, is not JSON, or describes no preset.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)  # at most: the path may be a device
    except FileNotFoundError:
        raise PresetFileError("no such file; it is relative to the run file") from None
    except OSError as error:
        raise PresetFileError(f"cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise PresetFileError("more than 1 MiB; a preset is a few kilobytes")
    try:
        return canonical(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PresetFileError(f"not UTF-8 text (byte {error.start})") from None


def canonical(text: str) -> str:
    """Return a preset's JSON with sorted keys and defaults.

    Raises:
        PresetFileError: it is not JSON, or describes no preset.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PresetFileError(f"line {error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of more than 4,300 digits
        raise PresetFileError(f"not JSON: {error}") from None
    problem = next(_problems(document), None)
    if problem is not None:
        raise PresetFileError(problem)
    return json.dumps({"train_text_encoder": False} | document, sort_keys=True)


def _problems(document: Any) -> Iterator[str]:
    if not isinstance(document, dict):
        yield "must be an object, as a shipped preset is"
        return
    yield from (f"{key}: is missing" for key in _REQUIRED if key not in document)
    for key in document:
        if key not in _KEYS:
            yield f"{key}: unknown key (known: {', '.join(_KEYS)})"
    yield from _component_problems("network", document.get("network"), NETWORKS)
    yield from _objective_problems(document)
    vae = document.get("vae")
    if vae is not None:
        yield from _shared_problems("vae", vae, (_AUTOENCODER,))
    yield from _encoder_problems(document)
    yield from _width_problems(document)


def _objective_problems(document: Mapping[str, Any]) -> Iterator[str]:
    prediction = document["prediction_type"]
    known = _PREDICTIONS[document["network"]["class"]]
    if prediction not in known:
        yield f"prediction_type: {prediction!r} is not one of {', '.join(known)}"
        return
    if prediction == "flow" and "diffusion" not in document:
        return
    if known == ("flow",):
        yield f"diffusion: does not apply to {document['network']['class']}; remove it"
        return
    diffusion = document.get("diffusion")
    if not isinstance(diffusion, dict):
        yield "diffusion: is missing: the noise schedule, such as that of sd2"
        return
    yield from _argument_problems("diffusion", diffusion, _DIFFUSION)
    steps = diffusion.get("num_train_timesteps")
    if steps != 1000:
        yield f"diffusion.num_train_timesteps: {steps!r} must be 1000"


def _encoder_problems(document: Mapping[str, Any]) -> Iterator[str]:
    encoders = document["text_encoders"]
    if not isinstance(encoders, list) or not 1 <= len(encoders) <= 3:
        yield "text_encoders: must be a list of 1 to 3 text encoders"
        return
    for index, encoder in enumerate(encoders):
        yield from _shared_problems(f"text_encoders[{index}]", encoder, TEXT_ENCODERS)
    trained = document.get("train_text_encoder", False)
    if not isinstance(trained, bool):
        yield f"train_text_encoder: {trained!r} must be true or false"
    elif trained and len(encoders) != 1:
        yield "train_text_encoder: only a single text encoder can be trained"


def _width_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Compare the width of encoded captions with what the network takes.

    They are joined as in :func:`sm_train.entrypoints.models.pipeline.encode`.
    """
    encoders = [
        shared_parts()[encoder] if isinstance(encoder, str) else encoder
        for encoder in document["text_encoders"]
    ]
    clip = [encoder for encoder in encoders if encoder["class"] != "T5EncoderModel"]
    t5 = [encoder["d_model"] for encoder in encoders if "d_model" in encoder]
    states = max([sum(encoder.get("hidden_size", 0) for encoder in clip), *t5])
    projections = [
        encoder.get("projection_dim", 0)
        for encoder in clip
        if encoder["class"].endswith("Projection")
    ]
    network = document["network"]
    takes = {
        "caption_channels": states,
        "joint_attention_dim": states,
        "pooled_projection_dim": sum(projections),
    }
    if network["class"] == "UNet2DConditionModel":
        takes["cross_attention_dim"] = states
        if time_width := network.get("addition_time_embed_dim"):
            # SDXL joins the projection with the embeddings of six sizes.
            takes["projection_class_embeddings_input_dim"] = sum(projections) + 6 * time_width
    for name, width in takes.items():
        given = network.get(name)
        if given is not None and given != width:
            yield f"network.{name}: {given} must be {width}, the width of the text encoders"


def _shared_problems(key: str, component: Any, classes: tuple[str, ...]) -> Iterator[str]:
    """Check a component, or the name of one that ships with sm-train."""
    if not isinstance(component, str):
        default = {"class": classes[0]} if len(classes) == 1 else {}
        component = default | component if isinstance(component, dict) else component
        yield from _component_problems(key, component, classes)
    elif shared_parts().get(component, {}).get("class") not in classes:
        known = sorted(
            name for name, shared_part in shared_parts().items() if shared_part["class"] in classes
        )
        yield f"{key}: {component!r} is not one of {', '.join(known)}"


def _component_problems(key: str, component: Any, classes: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(component, dict):
        yield f"{key}: must be an object with a class and its arguments"
        return
    class_name = component.get("class")
    if class_name not in classes:
        yield f"{key}.class: {class_name!r} is not one of {', '.join(classes)}"
        return
    arguments = {name: value for name, value in component.items() if name != "class"}
    yield from _argument_problems(key, arguments, _known_arguments()[class_name])
    if key == "network":
        for name in ("sample_size", "in_channels", "out_channels"):
            if not isinstance(component.get(name), int):
                yield f"network.{name}: {component.get(name)!r} must be a whole number"


def _argument_problems(
    key: str, arguments: Mapping[str, Any], known: Mapping[str, str]
) -> Iterator[str]:
    for name, value in arguments.items():
        if name not in known:
            yield f"{key}.{name}: unknown key (known: {', '.join(known)})"
        elif not _has_kind(value, known[name]):
            yield f"{key}.{name}: {value!r} must be {_KINDS[known[name]]}"


_KINDS = {
    "int": "a whole number of at least 0, or a list of them",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
}


def _has_kind(value: Any, kind: str) -> bool:
    """Return whether a value can be an argument of that kind; many may be null or a list."""
    if value is None or kind == "any":
        return True
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        numbers = value if isinstance(value, list) else [value]
        return all(type(number) is int and number >= 0 for number in numbers)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, str if kind == "str" else list)


@cache
def _known_arguments() -> dict[str, dict[str, str]]:
    """Return the arguments of each class with the kind of their value."""
    text = (files("sm_train.estimators") / "data" / "preset_arguments.json").read_text("utf-8")
    known: dict[str, dict[str, str]] = json.loads(text)
    return known

"""Builds a preset: real diffusers and transformers classes from their configurations.

Frozen parts (autoencoder, text encoders, tokenizers) come from a folder in diffusers' layout; what
is not there starts with random weights, which the caller must say aloud.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.job_config import JobConfigError, ModelConfig
from sm_train.entrypoints.common.sample_rng import SampleRng
from sm_train.entrypoints.models.components import downsampling, numbered, read_preset
from sm_train.entrypoints.models.network import Network, network_folder
from sm_train.entrypoints.models.objectives import Objective, objective_of
from sm_train.entrypoints.models.pipeline import Text, caption_tokens, encode, tokenize
from sm_train.entrypoints.models.text_to_image import TextToImage
from torch import Tensor, nn


@dataclass(frozen=True)
class Tokenize:
    """Tokenizers, each with the length of its captions; crosses to the loader's process."""

    tokenizers: tuple[tuple[Any, int], ...]

    def __call__(self, captions: Sequence[str]) -> list[Tensor]:
        """For each tokenizer the captions' token ids (B, L)."""
        return [tokenize(tokenizer, length, captions) for tokenizer, length in self.tokenizers]


@dataclass(frozen=True)
class TextEncoders:
    """The encoders of a caption, each with its tokenizer, in the order of diffusers' pipelines."""

    encoders: tuple[Any, ...]
    tokenizers: tuple[Any, ...]

    @property
    def tokenize(self) -> Tokenize:
        """For each encoder the captions' token ids."""
        pairs = zip(self.encoders, self.tokenizers, strict=True)
        return Tokenize(
            tuple((tokenizer, caption_tokens(one, tokenizer)) for one, tokenizer in pairs)
        )

    def encode(self, token_ids: Sequence[Tensor]) -> Text:
        return encode(self.encoders, token_ids)

    def folders(self) -> dict[str, Any]:
        """Encoders and tokenizers by the names of their folders in diffusers' layout."""
        named: dict[str, Any] = {}
        for number, pair in enumerate(zip(self.encoders, self.tokenizers, strict=True)):
            named[numbered("text_encoder", number)], named[numbered("tokenizer", number)] = pair
        return named


@dataclass(frozen=True)
class ModelComponents:
    """A model's parts; ``vae`` is None for a model on pixels.

    ``random_frozen`` names parts that are neither trained nor loaded. The network has no memory
    until :meth:`Network.fill`.
    """

    built: Network
    text: TextEncoders
    vae: Any
    objective: Objective
    train_text_encoder: bool
    random_frozen: tuple[str, ...] = ()

    @property
    def network(self) -> Any:
        return self.built.module

    @property
    def scale(self) -> int:
        """Pixels of an image's side for one of the network's input."""
        return downsampling(None if self.vae is None else self.vae.config)

    def draws(self, seed: int) -> SampleRng:
        """What is random in training on an image; an autoencoder's latents are drawn too."""
        kinds = 1 if self.vae is None else 2
        return SampleRng(seed, kinds, self.network.config.in_channels, self.scale)

    def trained(self) -> TextToImage:
        """The parts that learn, as one module that shares their weights."""
        text_encoder = self.text.encoders[0] if self.train_text_encoder else None
        return TextToImage(self.network, text_encoder, self.scale)

    def frozen(self) -> list[nn.Module]:
        text = () if self.train_text_encoder else self.text.encoders
        return [module for module in (self.vae, *text) if module is not None]

    def folders(self) -> dict[str, Any]:
        """The parts by the names of their folders in diffusers' layout."""
        named = {self.built.part: self.network, "scheduler": self.objective.sampler()}
        named |= self.text.folders()
        return named if self.vae is None else named | {"vae": self.vae}


def build(
    model: ModelConfig, resolution: int, *, components: Path | None, previous: Path | None
) -> ModelComponents:
    """Build a preset for images of ``resolution`` pixels.

    ``components`` holds frozen parts and, if there, a network to start from; ``previous`` is the
    final model of the stage before, whose trained parts win.

    Raises:
        SettingsError: there is no such preset, or a folder is of another model.
    """
    from diffusers import AutoencoderKL

    preset = read_preset(model.preset)
    random_frozen = []
    train_text = bool(preset["train_text_encoder"])
    text_from = previous if train_text and previous is not None else components
    text = load_text_encoders(text_from)
    if text is None:
        encoders = tuple(new_text_encoders(preset["text_encoders"]))
        text = TextEncoders(encoders, tuple(_bytes_tokenizer() for _ in encoders))
        if not train_text:
            random_frozen += [numbered("text_encoder", n) for n in range(len(text.encoders))]
    vae = None
    if preset["vae"] is not None:
        folder = _part(components, "vae")
        if folder:
            vae = AutoencoderKL.from_pretrained(folder, local_files_only=True)
        else:
            vae = new_autoencoder(preset["vae"])
            random_frozen.append("vae")
    scale = downsampling(None if vae is None else vae.config)
    starts = [one for one in (previous, components) if one is not None]
    folder = next((one for start in starts if (one := network_folder(start))), None)
    parts = ModelComponents(
        built=Network(preset["network"], folder, resolution // scale),
        text=text,
        vae=vae,
        objective=objective_of(preset, model, resolution),
        train_text_encoder=train_text,
        random_frozen=tuple(random_frozen),
    )
    for module in parts.frozen():
        module.requires_grad_(False).eval()
    return parts


def load_text_encoders(folder: Path | None, *, frame: bool = False) -> TextEncoders | None:
    """The text encoders of a model in diffusers' layout; None where it has none.

    One that is trained has no weights in a ``frame``; a checkpoint has them.

    Raises:
        SettingsError: one is of a kind that is not known here, or lacks its tokenizer.
    """
    import transformers
    from transformers import AutoTokenizer

    encoders: list[Any] = []
    tokenizers: list[Any] = []
    while path := _part(folder, numbered("text_encoder", len(encoders))):
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        [kind, *_] = config.get("architectures") or ["nothing"]
        if kind not in ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"):
            raise JobConfigError(f"{path}: is a {kind}; CLIP and T5 encoders can be used")
        tokenizer = _part(folder, numbered("tokenizer", len(encoders)))
        encoder = getattr(transformers, kind)
        if frame and not any(path.glob("*.safetensors")):
            encoders.append(encoder(encoder.config_class.from_pretrained(path)))
        else:
            # Transformers 5 keeps the precision it finds; autocast expects fp32 weights.
            encoders.append(encoder.from_pretrained(path, local_files_only=True).float())
        tokenizers.append(
            AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
            if tokenizer
            else _bytes_tokenizer()
        )
    return TextEncoders(tuple(encoders), tuple(tokenizers)) if encoders else None


def new_autoencoder(config: Mapping[str, Any]) -> Any:
    """Build the autoencoder of a preset's configuration with random weights."""
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_config(_without_class(config))


def new_text_encoders(configs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Build the text encoders of a preset's configurations with random weights."""
    import transformers

    encoders = []
    for config in configs:
        encoder_class = getattr(transformers, config["class"])
        encoders.append(encoder_class(encoder_class.config_class(**_without_class(config))))
    return encoders


def _bytes_tokenizer() -> Any:
    """One that reads bytes and needs no vocabulary."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def _without_class(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "class"}


def _part(folder: Path | None, name: str) -> Path | None:
    return folder / name if folder is not None and (folder / name).is_dir() else None

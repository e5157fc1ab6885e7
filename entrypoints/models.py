"""Builds a preset: real diffusers and transformers classes from their configurations.

Frozen parts (autoencoder, text encoder, tokenizer) come from a folder in diffusers' layout; what
is not there starts with random weights, which the caller must say aloud.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.diffusion import TextToImage
from sm_train.entrypoints.settings import SettingsError
from torch import nn

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Parts:
    """A model's parts; ``vae`` is None for a model on pixels.

    ``random_frozen`` names parts that are neither trained nor loaded.
    """

    unet: nn.Module
    text_encoder: nn.Module
    tokenizer: Any
    vae: nn.Module | None
    scheduler: Any
    train_text_encoder: bool
    random_frozen: tuple[str, ...] = ()

    def trained(self) -> TextToImage:
        """The parts that learn, as one module that shares their weights."""
        return TextToImage(self.unet, self.text_encoder if self.train_text_encoder else None)

    def frozen(self) -> list[nn.Module]:
        modules = [self.vae, None if self.train_text_encoder else self.text_encoder]
        return [module for module in modules if module is not None]


def read_preset(name: str) -> dict[str, Any]:
    """The shipped configuration called ``name``.

    Raises:
        SettingsError: there is none.
    """
    path = PRESETS / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(one.stem for one in PRESETS.glob("*.json")))
        raise SettingsError(f"model.preset: {name!r} is not one of {known}")
    preset: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return preset


def build(
    preset: dict[str, Any],
    prediction: str,
    resolution: int,
    *,
    components: Path | None,
    previous: Path | None,
) -> Parts:
    """Build a preset for images of ``resolution`` pixels.

    ``components`` holds frozen parts and, if there, a U-Net to start from; ``previous`` is the
    final model of the stage before, whose trained parts win.
    """
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    train_text = bool(preset["train_text_encoder"])
    trained_from = {"unet": previous or components, "text_encoder": components}
    if train_text and previous is not None:
        trained_from["text_encoder"] = previous
    random_frozen = []

    unet_folder = _part(trained_from["unet"], "unet")
    unet = (
        UNet2DConditionModel.from_pretrained(unet_folder, local_files_only=True)
        if unet_folder
        else UNet2DConditionModel.from_config(preset["unet"])
    )
    text_folder = _part(trained_from["text_encoder"], "text_encoder")
    if text_folder:
        # Transformers 5 keeps the precision it finds; autocast expects fp32 weights.
        text_encoder = CLIPTextModel.from_pretrained(text_folder, local_files_only=True).float()
    else:
        text_encoder = CLIPTextModel(CLIPTextConfig(**preset["text_encoder"]))
        if not train_text:
            random_frozen.append("text_encoder")
    vae = None
    if preset["vae"] is not None:
        vae_folder = _part(components, "vae")
        if vae_folder:
            vae = AutoencoderKL.from_pretrained(vae_folder, local_files_only=True)
        else:
            vae = AutoencoderKL.from_config(preset["vae"])
            random_frozen.append("vae")
    scale = 1 if vae is None else 2 ** (len(vae.config.block_out_channels) - 1)
    # Where the pipeline takes its default size from; the weights do not depend on it.
    unet.register_to_config(sample_size=resolution // scale)
    scheduler = DDPMScheduler(**preset["scheduler"], prediction_type=prediction)
    parts = Parts(
        unet=unet,
        text_encoder=text_encoder,
        tokenizer=_tokenizer(components),
        vae=vae,
        scheduler=scheduler,
        train_text_encoder=train_text,
        random_frozen=tuple(random_frozen),
    )
    for module in parts.frozen():
        module.requires_grad_(False).eval()
    return parts


def _part(folder: Path | None, name: str) -> Path | None:
    return folder / name if folder is not None and (folder / name).is_dir() else None


def _tokenizer(components: Path | None) -> Any:
    """The components' own tokenizer, or one that reads bytes and needs no vocabulary."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    folder = _part(components, "tokenizer")
    return (
        AutoTokenizer.from_pretrained(folder, local_files_only=True) if folder else ByT5Tokenizer()
    )


def longest_caption(text_encoder: Any, tokenizer: Any) -> int:
    """Tokens of a caption, with padding: what the text encoder has positions for."""
    return min(int(text_encoder.config.max_position_embeddings), int(tokenizer.model_max_length))

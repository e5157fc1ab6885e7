"""Build a preset's components: diffusers and transformers classes from their configurations.

Frozen components (autoencoder, text encoders, tokenizers) come from a folder in diffusers' layout.
Components that the folder lacks start with random weights, and the caller must log that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm_train.entrypoints.job_interface.job_config import (
    JobConfigError,
    ModelConfig,
    PredictionType,
    TrainingConfig,
)
from sm_train.entrypoints.job_interface.lora_layers import TRAINS_TEXT_ENCODER
from sm_train.entrypoints.models.component_files import (
    ComponentFileError,
    LocalComponents,
    frozen_identities,
    numbered_component,
    read_manifest,
    require_digests,
    weight_files,
)
from sm_train.entrypoints.models.components import (
    component_problems,
    downsampling,
    encodes_in_fp32,
    pretrained_scheduler,
    read_preset,
)
from sm_train.entrypoints.models.objectives import Objective, build_objective
from sm_train.entrypoints.models.pipeline import (
    T5_TOKENS,
    Text,
    caption_tokens,
    encode,
    predict,
    tokenize,
)
from sm_train.entrypoints.models.trained_network import Network, network_folder
from sm_train.entrypoints.sample_metadata.sample_rng import SampleRng
from torch import Tensor, nn

TEXT_ENCODERS = ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel")


class TextToImage(nn.Module):
    """Everything that is trained, as one module: the network and a trained text encoder.

    ``text_encoder`` is None if it is frozen. ``vae_scale_factor`` is the number of image pixels,
    along a side, for one pixel of the network's input.
    """

    def __init__(
        self, network: nn.Module, text_encoder: nn.Module | None, vae_scale_factor: int
    ) -> None:
        super().__init__()
        self.network = network
        self.text_encoder = text_encoder
        self.vae_scale_factor = vae_scale_factor

    def forward(
        self,
        noisy: Tensor,
        timesteps: Tensor,
        captions: Tensor,
        pooled: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Predict from ``noisy`` (B, C, H, W) at ``timesteps`` (B,), and the fields of a ``Text``.

        ``captions`` are token ids (B, L) for a trained text encoder, else hidden states (B, L, D).
        """
        text = Text(captions, pooled, sizes)
        if self.text_encoder is not None:
            text = encode([self.text_encoder], [captions])._replace(sizes=sizes)
        return predict(self.network, noisy, timesteps, text, self.vae_scale_factor)


@dataclass(frozen=True)
class CaptionTokenizer:
    """Tokenizers, each with the length of its captions. Picklable for the loader's process."""

    tokenizers: tuple[tuple[Any, int], ...]

    def __call__(self, captions: Sequence[str]) -> list[Tensor]:
        """Return the captions' token ids (B, L) for each tokenizer."""
        return [tokenize(tokenizer, length, captions) for tokenizer, length in self.tokenizers]


@dataclass(frozen=True)
class TextEncoders:
    """The text encoders, each with its tokenizer, in the order of diffusers' pipelines."""

    encoders: tuple[Any, ...]
    tokenizers: tuple[Any, ...]

    @property
    def tokenize(self) -> CaptionTokenizer:
        """Return a function from captions to the token ids of each encoder."""
        pairs = zip(self.encoders, self.tokenizers, strict=True)
        return CaptionTokenizer(
            tuple((tokenizer, caption_tokens(encoder, tokenizer)) for encoder, tokenizer in pairs)
        )

    def encode(self, token_ids: Sequence[Tensor]) -> Text:
        """Encode captions, given their token ids (B, L) for each encoder."""
        return encode(self.encoders, token_ids)

    def named_components(self) -> dict[str, Any]:
        """Return encoders and tokenizers by the names of their folders in diffusers' layout."""
        named: dict[str, Any] = {}
        for number, encoder in enumerate(self.encoders):
            named[numbered_component("text_encoder", number)] = encoder
        for number, tokenizer in enumerate(self.tokenizers):
            named[numbered_component("tokenizer", number)] = tokenizer
        return named


@dataclass(frozen=True)
class ModelComponents:
    """A model's components; ``vae`` is None for a model on pixels.

    ``random_frozen`` names components that are neither trained nor loaded. The network has no
    memory until :meth:`Network.materialize`.
    """

    network_init: Network
    text_encoders: TextEncoders
    vae: Any
    objective: Objective
    train_text_encoder: bool
    random_frozen: tuple[str, ...] = ()
    identities: Mapping[str, str] = field(default_factory=dict)
    """What the tensors of the frozen components hold that were loaded, by their names
    (:func:`~sm_train.entrypoints.models.component_files.tensors_identity`)."""

    @property
    def network(self) -> Any:
        """The network's module."""
        return self.network_init.module

    @property
    def vae_scale_factor(self) -> int:
        """Pixels of an image's side for one pixel of the network's input."""
        return downsampling(None if self.vae is None else self.vae.config)

    def latent_scale(self) -> dict[str, float | None]:
        """Return how the autoencoder's latents are scaled; empty without one."""
        if self.vae is None:
            return {}
        config = self.vae.config
        return {
            "vae.scaling_factor": config.scaling_factor,
            "vae.shift_factor": getattr(config, "shift_factor", None),
        }

    @property
    def is_conditioned_on_sizes(self) -> bool:
        """Whether the network gets each image's original size and crop, as SDXL does."""
        return getattr(self.network.config, "addition_embed_type", None) == "text_time"

    def encodes_in_fp32(self, training: TrainingConfig) -> bool:
        """Return whether the autoencoder encodes in fp32; False without one."""
        if self.vae is None:
            return False
        return encodes_in_fp32(self.vae.config, training.precision, training.vae_precision)

    def sample_rng(self, seed: int) -> SampleRng:
        """Return the random numbers of a training sample: noise and, with a VAE, its latent."""
        kinds = 1 if self.vae is None else 2
        return SampleRng(seed, kinds, self.network.config.in_channels, self.vae_scale_factor)

    def trained_module(self) -> TextToImage:
        """Return the trained components as one module, which shares their weights."""
        text_encoder = self.text_encoders.encoders[0] if self.train_text_encoder else None
        return TextToImage(self.network, text_encoder, self.vae_scale_factor)

    def frozen_modules(self) -> list[nn.Module]:
        """Return the modules that are not trained."""
        text = () if self.train_text_encoder else self.text_encoders.encoders
        return [module for module in (self.vae, *text) if module is not None]

    def named_components(self) -> dict[str, Any]:
        """Return the components by the names of their folders in diffusers' layout."""
        named = {
            self.network_init.component: self.network,
            "scheduler": self.objective.inference_scheduler(),
            **self.text_encoders.named_components(),
        }
        return named if self.vae is None else named | {"vae": self.vae}


def build_components(
    model: ModelConfig,
    resolution: int,
    *,
    components: Path | None,
    previous: Path | None,
    prediction_type: PredictionType | None = None,
) -> ModelComponents:
    """Build a preset for images of ``resolution`` pixels.

    ``components`` is a folder with frozen components and, optionally, a network to start from.
    ``previous`` is the final model of the previous stage, or its adapter; its trained components
    take precedence. ``prediction_type`` is what the stage learns in place of what an earlier stage
    learned.

    Raises:
        JobConfigError: there is no such preset, or a folder holds another model.
    """
    if model.preset is None:
        raise JobConfigError("model.preset: is missing; name the model that is trained")
    preset = read_preset(model.preset, model.preset_content)
    if model.lora is not None and preset["train_text_encoder"]:
        raise JobConfigError(f"model.lora: {TRAINS_TEXT_ENCODER}")
    scheduler = None
    if components is not None:
        require_components(components, preset, model)
        scheduler = pretrained_scheduler(LocalComponents(components))
    random_frozen = []
    train_text = bool(preset["train_text_encoder"])
    text_folder = previous if train_text and previous is not None else components
    text_encoders = load_text_encoders(text_folder)
    if text_encoders is None:
        encoders = tuple(new_text_encoders(preset["text_encoders"]))
        text_encoders = TextEncoders(encoders, tuple(map(_bytes_tokenizer, encoders)))
        if not train_text:
            random_frozen += [
                numbered_component("text_encoder", number) for number in range(len(encoders))
            ]
    vae = None
    if preset["vae"] is not None:
        vae_folder = _subfolder(components, "vae")
        if vae_folder:
            vae = load_autoencoder(vae_folder)
        else:
            vae = new_autoencoder(preset["vae"])
            random_frozen.append("vae")
    vae_scale_factor = downsampling(None if vae is None else vae.config)
    network_folders = [
        network_folder(folder) for folder in (previous, components) if folder is not None
    ]
    start = next((folder for folder in network_folders if folder is not None), None)
    network = Network(
        preset["network"],
        start,
        resolution // vae_scale_factor,
        lora=model.lora,
        adapter=previous,
    )
    if model.lora is not None and start is None:
        random_frozen.append(network.component)
    built = ModelComponents(
        network_init=network,
        text_encoders=text_encoders,
        vae=vae,
        objective=build_objective(preset, model, resolution, scheduler, prediction_type),
        train_text_encoder=train_text,
        random_frozen=tuple(random_frozen),
        identities=_loaded_identities(components, has_vae=vae is not None, trains_text=train_text),
    )
    for module in built.frozen_modules():
        module.requires_grad_(False).eval()
    return built


def _loaded_identities(
    components: Path | None, *, has_vae: bool, trains_text: bool
) -> dict[str, str]:
    """Return the identities of the frozen components that are loaded from a folder."""
    if components is None:
        return {}
    found = frozen_identities(LocalComponents(components))
    return {
        name: identity
        for name, identity in found.items()
        if (has_vae if name == "vae" else not trains_text)
    }


def require_components(folder: Path, preset: Mapping[str, Any], model: ModelConfig) -> None:
    """Refuse components that do not fit the run file, as ``sm-train check`` does.

    Raises:
        JobConfigError: they do not.
    """
    problems = component_problems(LocalComponents(folder), preset, model)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise JobConfigError(f"model.components: {problems[0]}{more}")


def require_unchanged(components: Path | None) -> None:
    """Refuse components whose files differ from the manifest of ``sm-train fetch-model``.

    Reads every byte: call it once on each node.

    Raises:
        JobConfigError: a file differs.
    """
    if components is None:
        return
    try:
        manifest = read_manifest(LocalComponents(components))
        if manifest is not None:
            require_digests(components, manifest)
    except (ComponentFileError, FileNotFoundError) as error:
        raise JobConfigError(f"model.components: {error}") from None


def load_text_encoders(
    folder: Path | None, *, allow_missing_weights: bool = False
) -> TextEncoders | None:
    """Load the text encoders of a folder in diffusers' layout; None if it has none.

    With ``allow_missing_weights`` an encoder without weights is built from its configuration: the
    components next to checkpoints lack those of a trained encoder, which each checkpoint holds.

    Raises:
        JobConfigError: an encoder is of an unknown class.
    """
    import transformers
    from transformers import AutoTokenizer

    encoders: list[Any] = []
    tokenizers: list[Any] = []
    while path := _subfolder(folder, numbered_component("text_encoder", len(encoders))):
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        [class_name, *_] = config.get("architectures") or ["nothing"]
        if class_name not in TEXT_ENCODERS:
            raise JobConfigError(
                f"{path}: class {class_name} is not supported; use one of "
                f"{', '.join(TEXT_ENCODERS)}"
            )
        tokenizer = _subfolder(folder, numbered_component("tokenizer", len(encoders)))
        encoder_class = getattr(transformers, class_name)
        if allow_missing_weights and not any(path.glob("*.safetensors")):
            encoders.append(encoder_class(encoder_class.config_class.from_pretrained(path)))
        else:
            # Transformers 5 keeps the stored precision; autocast expects fp32 weights.
            encoders.append(_load_pretrained(encoder_class, path).float())
        if tokenizer is None:
            raise JobConfigError(
                f"{path}: has no tokenizer next to it, and captions need the one that it was "
                "trained with; copy it from the same model"
            )
        tokenizers.append(AutoTokenizer.from_pretrained(tokenizer, local_files_only=True))
        if hasattr(encoders[-1].config, "max_position_embeddings"):
            # Diffusers' pipelines pad to the tokenizer's length, training to the encoder's.
            tokenizers[-1].model_max_length = caption_tokens(encoders[-1], tokenizers[-1])
    return TextEncoders(tuple(encoders), tuple(tokenizers)) if encoders else None


def load_autoencoder(folder: Path) -> Any:
    """Load an autoencoder in fp32 from safetensors files.

    Raises:
        JobConfigError: it has no usable weights.
    """
    from diffusers import AutoencoderKL

    return _load_pretrained(AutoencoderKL, folder).float()


def _load_pretrained(model_class: Any, folder: Path) -> Any:
    """Load a component from safetensors files, of the fp16 variant if there are no others.

    Raises:
        JobConfigError: there are none, or one is missing.
    """
    try:
        variant = weight_files(LocalComponents(folder.parent), folder.name).variant
    except ComponentFileError as error:
        raise JobConfigError(f"{folder.parent}: {error}") from None
    return model_class.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, variant=variant
    )


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


def _bytes_tokenizer(encoder: Any) -> Any:
    """Return a tokenizer on bytes, which needs no vocabulary, for captions of ``encoder``."""
    from transformers import ByT5Tokenizer

    longest = getattr(encoder.config, "max_position_embeddings", T5_TOKENS)
    return ByT5Tokenizer(model_max_length=longest)


def _without_class(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "class"}


def _subfolder(folder: Path | None, name: str) -> Path | None:
    return folder / name if folder is not None and (folder / name).is_dir() else None

"""Images from text: the pipeline that a final model is saved with.

This file is copied into the model's folder, so that ``DiffusionPipeline.from_pretrained(folder,
trust_remote_code=True)`` works where sm-train is not installed. It imports nothing of the project.
Training asks the networks and the text encoders by the same functions as sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers import (
    DiffusionPipeline,
    ImagePipelineOutput,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  the field's own name for it

T5_TOKENS = 256
"""Tokens of a caption for a T5, which has no limit of its own (as in diffusers' SD3 pipeline)."""


class Text(NamedTuple):
    """Captions for a network: ``states`` (B, L, D), and ``pooled`` (B, P) where encoders project.

    For a text encoder that is trained ``states`` are token ids (B, L).
    """

    states: Tensor
    pooled: Tensor | None = None


def caption_tokens(encoder: Any, tokenizer: Any) -> int:
    """Tokens of a caption, with padding: what the text encoder has positions for."""
    longest = getattr(encoder.config, "max_position_embeddings", T5_TOKENS)
    return min(int(longest), int(tokenizer.model_max_length))


def tokenize(tokenizer: Any, length: int, captions: Sequence[str]) -> Tensor:
    """Token ids (B, L), padded and cut to ``length``."""
    ids: Tensor = tokenizer(
        list(captions),
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
    ).input_ids
    return ids


def encode(encoders: Sequence[Any], token_ids: Sequence[Tensor]) -> Text:
    """Hidden states of captions, for each encoder its token ids (B, L).

    One encoder gives its last layer (Stable Diffusion 2, PixArt). Of several, CLIP's give their
    layer before the last, joined along the width (SDXL), and padded to that of a T5 whose tokens
    come behind theirs (Stable Diffusion 3). Projections are joined too.
    """
    if len(encoders) == 1:
        found = encoders[0](token_ids[0])
        return Text(found.last_hidden_state, getattr(found, "text_embeds", None))
    clip, pooled, t5 = [], [], []
    for encoder, ids in zip(encoders, token_ids, strict=True):
        if encoder.config.model_type == "t5":
            t5.append(encoder(ids)[0])
            continue
        found = encoder(ids, output_hidden_states=True)
        clip.append(found.hidden_states[-2])
        if (projected := getattr(found, "text_embeds", None)) is not None:
            pooled.append(projected)
    states = torch.cat(clip, dim=-1)
    if t5:
        padded = F.pad(states, (0, t5[0].shape[-1] - states.shape[-1]))
        states = torch.cat([padded, *t5], dim=1)
    return Text(states, torch.cat(pooled, dim=-1))


def predict(network: Any, noisy: Tensor, timesteps: Tensor, text: Text, scale: int) -> Tensor:
    """What ``network`` says of ``noisy`` (B, C, H, W) at ``timesteps`` (B,) of 1,000.

    ``scale`` is how many pixels one of ``noisy`` stands for, along a side.
    """
    if isinstance(network, SD3Transformer2DModel):
        found = network(noisy, text.states, text.pooled, timesteps)
    elif isinstance(network, PixArtTransformer2DModel):
        nothing = {"resolution": None, "aspect_ratio": None}
        found = network(noisy, text.states, timesteps, added_cond_kwargs=nothing)
    elif network.config.addition_embed_type == "text_time":
        height, width = (scale * side for side in noisy.shape[-2:])
        # SDXL's size conditioning (arXiv 2307.01952, section 2.2): original, crop's corner, target.
        sizes = noisy.new_tensor([height, width, 0, 0, height, width]).expand(len(noisy), -1)
        added = {"text_embeds": text.pooled, "time_ids": sizes}
        found = network(noisy, timesteps, text.states, added_cond_kwargs=added)
    else:
        found = network(noisy, timesteps, text.states)
    prediction: Tensor = found.sample
    return prediction


class TextToImagePipeline(DiffusionPipeline):  # type: ignore[misc, unused-ignore]
    """Text-conditioned diffusion on pixels, or on latents where there is an autoencoder.

    The network is a ``unet`` or a ``transformer``.
    """

    _optional_components = [  # noqa: RUF012  diffusers' own attribute
        "unet",
        "transformer",
        "vae",
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
        "tokenizer_2",
        "tokenizer_3",
    ]
    model_cpu_offload_seq = "text_encoder->text_encoder_2->text_encoder_3->unet->transformer->vae"

    def __init__(
        self,
        scheduler: Any,
        tokenizer: Any,
        text_encoder: Any = None,
        unet: Any = None,
        transformer: Any = None,
        vae: Any = None,
        text_encoder_2: Any = None,
        text_encoder_3: Any = None,
        tokenizer_2: Any = None,
        tokenizer_3: Any = None,
    ) -> None:
        super().__init__()
        self.register_modules(
            scheduler=scheduler,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            unet=unet,
            transformer=transformer,
            vae=vae,
            text_encoder_2=text_encoder_2,
            text_encoder_3=text_encoder_3,
            tokenizer_2=tokenizer_2,
            tokenizer_3=tokenizer_3,
        )

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """Draw one image for each prompt.

        ``height`` and ``width`` are pixels (the network's training size by default).
        ``guidance_scale`` is classifier-free guidance (Ho and Salimans, arXiv 2207.12598); 1
        turns it off. ``generator`` is one for all images or one for each. ``output_type`` is
        "pil" or "np", the latter (B, H, W, C) in 0 to 1.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        network = self.unet or self.transformer
        scale = 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)
        side = network.config.sample_size * scale
        shape = (
            len(prompts),
            network.config.in_channels,
            (height or side) // scale,
            (width or side) // scale,
        )
        text = self._encode(prompts, guidance_scale)
        ask = partial(predict, network, text=text, scale=scale)
        self.scheduler.set_timesteps(num_inference_steps, device=self._execution_device)
        sample = _noise(shape, generator).to(self._execution_device, network.dtype)
        sample = sample * getattr(self.scheduler, "init_noise_sigma", 1.0)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            prediction = self._guided(ask, sample, timestep, guidance_scale)
            sample = self.scheduler.step(prediction, timestep, sample).prev_sample
        return ImagePipelineOutput(images=self._finish(sample, output_type))

    def _guided(
        self, ask: Callable[..., Tensor], sample: Tensor, timestep: Tensor, guidance: float
    ) -> Tensor:
        """The prediction; guided by that without a caption, whose texts then come first."""
        doubled = sample if guidance == 1 else torch.cat([sample, sample])
        prediction = ask(noisy=doubled, timesteps=timestep.expand(len(doubled)))
        if guidance == 1:
            return prediction
        free, with_text = prediction.chunk(2)
        return free + guidance * (with_text - free)

    def _encode(self, prompts: list[str], guidance: float) -> Text:
        pairs = [
            (self.text_encoder, self.tokenizer),
            (self.text_encoder_2, self.tokenizer_2),
            (self.text_encoder_3, self.tokenizer_3),
        ]
        used = [(encoder, tokenizer) for encoder, tokenizer in pairs if encoder is not None]
        texts = prompts if guidance == 1 else ["", *prompts]
        device = self._execution_device
        ids = [tokenize(one[1], caption_tokens(*one), texts).to(device) for one in used]
        text = encode([encoder for encoder, _ in used], ids)
        if guidance == 1:
            return text
        # The caption that is none is encoded once.
        rows = torch.tensor([0] * len(prompts) + [*range(1, len(texts))], device=device)
        pooled = None if text.pooled is None else text.pooled[rows]
        return Text(text.states[rows], pooled)

    def _finish(self, sample: Tensor, output_type: str) -> Any:
        if self.vae is not None:
            config = self.vae.config
            sample = sample / config.scaling_factor + (config.shift_factor or 0.0)
            sample = self.vae.decode(sample).sample
        pixels = (sample.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        return pixels if output_type == "np" else self.numpy_to_pil(pixels)


def _noise(
    shape: tuple[int, ...], generator: torch.Generator | list[torch.Generator] | None
) -> Tensor:
    if isinstance(generator, list):
        return torch.cat([_noise((1, *shape[1:]), one) for one in generator])
    return torch.randn(shape, generator=generator, device=generator.device if generator else "cpu")

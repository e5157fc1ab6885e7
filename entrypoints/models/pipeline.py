"""The text-to-image pipeline that a final model is saved with.

This file is copied into the model's folder, so that ``DiffusionPipeline.from_pretrained(folder,
trust_remote_code=True)`` works without sm-train. It must not import from the project. Training and
sampling call networks and text encoders by the same functions.
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
"""Length of a caption for a T5, which has no maximum length (as in diffusers' SD3 pipeline)."""


class Text(NamedTuple):
    """Encoded captions: hidden ``states`` (B, L, D), and ``pooled`` (B, P) if encoders project.

    For a trained text encoder ``states`` are token ids (B, L). Rows of zeros in ``states`` are
    padding, which PixArt masks. ``sizes`` (B, 4) are what SDXL is also conditioned on: original
    height and width, top and left of the crop; None if the images are originals of this size.
    """

    states: Tensor
    pooled: Tensor | None = None
    sizes: Tensor | None = None


def caption_tokens(encoder: Any, tokenizer: Any) -> int:
    """Return a caption's length in tokens, with padding: that of the encoder's position table."""
    longest = getattr(encoder.config, "max_position_embeddings", T5_TOKENS)
    return min(int(longest), int(tokenizer.model_max_length))


def tokenize(tokenizer: Any, length: int, captions: Sequence[str]) -> Tensor:
    """Return token ids (B, L), padded and truncated to ``length``."""
    ids: Tensor = tokenizer(
        list(captions),
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
    ).input_ids
    return ids


def encode(encoders: Sequence[Any], token_ids: Sequence[Tensor]) -> Text:
    """Encode captions, given their token ids (B, L) for each encoder.

    A single encoder's last layer is used (Stable Diffusion 2, PixArt). Of several encoders, those
    of CLIP contribute their second to last layer, joined along the width (SDXL). A T5's states
    follow along the length, and CLIP's are padded to their width (Stable Diffusion 3). Projections
    are joined along the width.
    """
    if len(encoders) == 1 and encoders[0].config.model_type == "t5":
        return _encode_with_padding(encoders[0], token_ids[0])
    if len(encoders) == 1:
        output = encoders[0](token_ids[0])
        return Text(output.last_hidden_state, getattr(output, "text_embeds", None))
    clip, pooled, t5 = [], [], []
    for encoder, ids in zip(encoders, token_ids, strict=True):
        if encoder.config.model_type == "t5":
            t5.append(encoder(ids)[0])
            continue
        output = encoder(ids, output_hidden_states=True)
        clip.append(output.hidden_states[-2])
        if (projected := getattr(output, "text_embeds", None)) is not None:
            pooled.append(projected)
    states = torch.cat(clip, dim=-1)
    if t5:
        padded = F.pad(states, (0, t5[0].shape[-1] - states.shape[-1]))
        states = torch.cat([padded, *t5], dim=1)
    return Text(states, torch.cat(pooled, dim=-1))


def _encode_with_padding(encoder: Any, ids: Tensor) -> Text:
    """Encode captions by a T5 alone, as diffusers' PixArt pipeline does: without their padding.

    States of padding are zeros, from which :func:`predict` gets the mask. So precomputed states
    need no mask of their own.
    """
    mask = ids.ne(encoder.config.pad_token_id)
    # Shaped for attention (B, heads, queries, keys): of a mask (B, L) transformers asks whether it
    # masks anything, and the CPU would wait for the GPU's answer.
    states = encoder(ids, attention_mask=mask[:, None, None]).last_hidden_state
    return Text(states * mask[:, :, None].to(states.dtype))


def predict(
    network: Any, noisy: Tensor, timesteps: Tensor, text: Text, vae_scale_factor: int
) -> Tensor:
    """Return the network's prediction for ``noisy`` (B, C, H, W) at ``timesteps`` (B,) of 1,000.

    ``vae_scale_factor`` is the number of image pixels, along a side, for one of ``noisy``.
    """
    if isinstance(network, SD3Transformer2DModel):
        states = _with_absent_t5(text.states, network.config.joint_attention_dim)
        output = network(noisy, states, text.pooled, timesteps)
    elif isinstance(network, PixArtTransformer2DModel):
        output = network(
            noisy,
            text.states,
            timesteps,
            added_cond_kwargs=_pixart_conditions(network, noisy, vae_scale_factor),
            encoder_attention_mask=text.states.ne(0).any(dim=-1),
        )
    elif network.config.addition_embed_type == "text_time":
        height, width = (vae_scale_factor * side for side in noisy.shape[-2:])
        # SDXL's size conditioning (arXiv 2307.01952, section 2.2): original size, crop's corner,
        # target size.
        sizes = noisy.new_zeros(len(noisy), 6)
        # Filled on the device: a tensor of the host's numbers would be copied, and the CPU would
        # wait for the copy.
        sizes[:, 0::4].fill_(height)
        sizes[:, 1::4].fill_(width)
        if text.sizes is not None:
            sizes[:, :4] = text.sizes
        added = {"text_embeds": text.pooled, "time_ids": sizes}
        output = network(noisy, timesteps, text.states, added_cond_kwargs=added)
    else:
        output = network(noisy, timesteps, text.states)
    prediction: Tensor = output.sample
    return prediction


def _with_absent_t5(states: Tensor, width: int) -> Tensor:
    """Return Stable Diffusion 3's ``states`` (B, L, D); a missing T5 contributes zeros.

    CLIP's states alone are shorter than a T5's, and may be narrower than its ``width``.
    """
    if states.shape[1] > T5_TOKENS:
        return states
    absent = states.new_zeros(len(states), T5_TOKENS, width)
    return torch.cat([F.pad(states, (0, width - states.shape[-1])), absent], dim=1)


def _pixart_conditions(
    network: Any, noisy: Tensor, vae_scale_factor: int
) -> dict[str, Tensor | None]:
    """Return the image size (B, 2) and aspect ratio (B, 1) if the network was trained with them."""
    if not network.config.use_additional_conditions:
        return {"resolution": None, "aspect_ratio": None}
    height, width = (vae_scale_factor * side for side in noisy.shape[-2:])
    # Filled on the device, as a copy from the host would block.
    resolution = noisy.new_full((len(noisy), 2), float(height))
    resolution[:, 1].fill_(width)
    return {
        "resolution": resolution,
        "aspect_ratio": noisy.new_full((len(noisy), 1), height / width),
    }


class TextToImagePipeline(DiffusionPipeline):  # type: ignore[misc, unused-ignore]
    """Text-conditioned diffusion on pixels, or on latents if there is a VAE.

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
        """Sample one image for each prompt.

        ``height`` and ``width`` are in pixels (the network's training size by default).
        ``guidance_scale`` is classifier-free guidance (Ho and Salimans, arXiv 2207.12598); 1
        disables it. ``generator`` is one for all images or a list with one for each.
        ``output_type`` is "pil" or "np", the latter (B, H, W, C) in 0 to 1.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        network = self.unet or self.transformer
        vae_scale_factor = (
            1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)
        )
        side = network.config.sample_size * vae_scale_factor
        shape = (
            len(prompts),
            network.config.in_channels,
            (height or side) // vae_scale_factor,
            (width or side) // vae_scale_factor,
        )
        text = self._encode(prompts, guidance_scale)
        predict_noisy = partial(predict, network, text=text, vae_scale_factor=vae_scale_factor)
        self.scheduler.set_timesteps(num_inference_steps, device=self._execution_device)
        sample = _noise(shape, generator).to(self._execution_device, network.dtype)
        sample = sample * getattr(self.scheduler, "init_noise_sigma", 1.0)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            prediction = self._guided(predict_noisy, sample, timestep, guidance_scale)
            sample = self.scheduler.step(prediction, timestep, sample).prev_sample
        return ImagePipelineOutput(images=self._finish(sample, output_type))

    def _guided(
        self,
        predict_noisy: Callable[..., Tensor],
        sample: Tensor,
        timestep: Tensor,
        guidance_scale: float,
    ) -> Tensor:
        """Predict with classifier-free guidance; one batch holds both halves."""
        noisy = sample if guidance_scale == 1 else torch.cat([sample, sample])
        prediction = predict_noisy(noisy=noisy, timesteps=timestep.expand(len(noisy)))
        if guidance_scale == 1:
            return prediction
        # Same order as in _encode.
        unconditional, conditional = prediction.chunk(2)
        return unconditional + guidance_scale * (conditional - unconditional)

    def _encode(self, prompts: list[str], guidance_scale: float) -> Text:
        """Encode the prompts; with guidance, the empty prompt's text precedes for each of them."""
        pairs = [
            (self.text_encoder, self.tokenizer),
            (self.text_encoder_2, self.tokenizer_2),
            (self.text_encoder_3, self.tokenizer_3),
        ]
        used = [(encoder, tokenizer) for encoder, tokenizer in pairs if encoder is not None]
        texts = prompts if guidance_scale == 1 else ["", *prompts]
        device = self._execution_device
        ids = [
            tokenize(tokenizer, caption_tokens(encoder, tokenizer), texts).to(device)
            for encoder, tokenizer in used
        ]
        text = encode([encoder for encoder, _ in used], ids)
        # Frozen components may be stored in another precision than the trained network.
        dtype = (self.unet or self.transformer).dtype
        pooled = None if text.pooled is None else text.pooled.to(dtype)
        text = Text(text.states.to(dtype), pooled)
        if guidance_scale == 1:
            return text
        # The empty prompt is encoded once and repeated.
        rows = torch.tensor([0] * len(prompts) + [*range(1, len(texts))], device=device)
        pooled = None if text.pooled is None else text.pooled[rows]
        return Text(text.states[rows], pooled)

    def _finish(self, sample: Tensor, output_type: str) -> Any:
        """Decode latents and convert pixels from (B, C, H, W) in -1 to 1."""
        if self.vae is not None:
            config = self.vae.config
            sample = sample / config.scaling_factor + (config.shift_factor or 0.0)
            sample = self.vae.decode(sample.to(self.vae.dtype)).sample
        pixels = (sample.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        return pixels if output_type == "np" else self.numpy_to_pil(pixels)


def _noise(
    shape: tuple[int, ...], generator: torch.Generator | list[torch.Generator] | None
) -> Tensor:
    if isinstance(generator, list):
        return torch.cat([_noise((1, *shape[1:]), each) for each in generator])
    return torch.randn(shape, generator=generator, device=generator.device if generator else "cpu")

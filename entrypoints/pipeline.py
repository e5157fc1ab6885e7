"""Images from text: the pipeline that a final model is saved with.

This file is copied into the model's folder, so that ``DiffusionPipeline.from_pretrained(folder,
trust_remote_code=True)`` works where sm-train is not installed. It imports nothing of the project.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput


class TextToImagePipeline(DiffusionPipeline):  # type: ignore[misc, unused-ignore]
    """Text-conditioned diffusion on pixels, or on latents where there is an autoencoder."""

    _optional_components = ["vae"]  # noqa: RUF012  diffusers' own attribute
    model_cpu_offload_seq = "text_encoder->unet->vae"

    def __init__(
        self, unet: Any, scheduler: Any, text_encoder: Any, tokenizer: Any, vae: Any = None
    ) -> None:
        super().__init__()
        self.register_modules(
            unet=unet,
            scheduler=scheduler,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            vae=vae,
        )

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """Draw one image for each prompt.

        ``height`` and ``width`` are pixels (the U-Net's training size by default).
        ``guidance_scale`` is classifier-free guidance (Ho and Salimans, arXiv 2207.12598); 1
        turns it off. ``output_type`` is "pil" or "np", the latter (B, H, W, C) in 0 to 1.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        device = self._execution_device
        states = self._encode(["", *prompts], device)
        unconditional = states[:1].expand(len(prompts), -1, -1)
        both = torch.cat([unconditional, states[1:]])
        scale = 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)
        side = self.unet.config.sample_size * scale
        shape = (
            len(prompts),
            self.unet.config.in_channels,
            (height or side) // scale,
            (width or side) // scale,
        )
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        noise = torch.randn(
            shape, generator=generator, device=generator.device if generator else device
        )
        sample = noise.to(device, self.unet.dtype) * self.scheduler.init_noise_sigma
        for timestep in self.progress_bar(self.scheduler.timesteps):
            doubled = self.scheduler.scale_model_input(torch.cat([sample, sample]), timestep)
            prediction = self.unet(doubled, timestep, encoder_hidden_states=both).sample
            free, guided = prediction.chunk(2)
            prediction = free + guidance_scale * (guided - free)
            sample = self.scheduler.step(prediction, timestep, sample).prev_sample
        return ImagePipelineOutput(images=self._finish(sample, output_type))

    def _encode(self, prompts: list[str], device: torch.device) -> torch.Tensor:
        length = min(
            self.text_encoder.config.max_position_embeddings, self.tokenizer.model_max_length
        )
        tokens = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        states: torch.Tensor = self.text_encoder(tokens.input_ids.to(device))[0]
        return states

    def _finish(self, sample: torch.Tensor, output_type: str) -> Any:
        if self.vae is not None:
            sample = self.vae.decode(sample / self.vae.config.scaling_factor).sample
        pixels = (sample.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        return pixels if output_type == "np" else self.numpy_to_pil(pixels)

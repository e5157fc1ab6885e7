"""What the network is trained to predict."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from torch import Tensor, nn


class TextToImage(nn.Module):
    """Everything that is trained, as one module: the U-Net and, if it learns too, the text encoder.

    ``text_encoder`` is None when it is frozen; then captions come in as hidden states.
    """

    def __init__(self, unet: nn.Module, text_encoder: nn.Module | None) -> None:
        super().__init__()
        self.unet = unet
        self.text_encoder = text_encoder

    def forward(self, noisy: Tensor, timesteps: Tensor, captions: Tensor) -> Tensor:
        """Predict from ``noisy`` (B, C, H, W) at ``timesteps`` (B,).

        ``captions`` are token ids (B, L) for a trained text encoder, else hidden states (B, L, D).
        """
        states = captions if self.text_encoder is None else encode(self.text_encoder, captions)
        prediction: Tensor = self.unet(noisy, timesteps, encoder_hidden_states=states).sample
        return prediction


def encode(text_encoder: nn.Module, token_ids: Tensor) -> Tensor:
    """Hidden states (B, L, D) of token ids (B, L)."""
    states: Tensor = text_encoder(token_ids)[0]
    return states


def loss(
    model: nn.Module, scheduler: Any, images: Tensor, captions: Tensor, generator: torch.Generator
) -> Tensor:
    """Mean squared error of the prediction for one micro-batch, a scalar.

    ``images`` are pixels or latents (B, C, H, W). The target is the noise or the velocity
    v = α·noise − σ·image (Salimans and Ho, arXiv 2202.00512), as the scheduler's prediction type
    says. Noise and timesteps are drawn from ``generator``, on its device.
    """
    noise = torch.randn(
        images.shape, generator=generator, device=generator.device, dtype=images.dtype
    ).to(images.device)
    timesteps = torch.randint(
        0,
        scheduler.config.num_train_timesteps,
        (images.shape[0],),
        generator=generator,
        device=generator.device,
    ).to(images.device)
    noisy = scheduler.add_noise(images, noise, timesteps)
    if scheduler.config.prediction_type == "v_prediction":
        target = scheduler.get_velocity(images, noise, timesteps)
    else:
        target = noise
    return F.mse_loss(model(noisy, timesteps, captions).float(), target.float())

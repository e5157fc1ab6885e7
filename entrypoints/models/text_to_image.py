"""Everything that is trained, as one module."""

from __future__ import annotations

from sm_train.entrypoints.models.pipeline import Text, encode, predict
from torch import Tensor, nn


class TextToImage(nn.Module):
    """The network and, if it learns too, the text encoder (None when it is frozen).

    ``scale`` is how many pixels one of the network's inputs stands for, along a side.
    """

    def __init__(self, network: nn.Module, text_encoder: nn.Module | None, scale: int) -> None:
        super().__init__()
        self.network = network
        self.text_encoder = text_encoder
        self.scale = scale

    def forward(
        self, noisy: Tensor, timesteps: Tensor, captions: Tensor, pooled: Tensor | None = None
    ) -> Tensor:
        """Predict from ``noisy`` (B, C, H, W) at ``timesteps`` (B,).

        ``captions`` are token ids (B, L) for a trained text encoder, else hidden states (B, L, D).
        """
        text = Text(captions, pooled)
        if self.text_encoder is not None:
            text = encode([self.text_encoder], [captions])
        return predict(self.network, noisy, timesteps, text, self.scale)

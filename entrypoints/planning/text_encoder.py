"""Weights of transformers' text encoders, from their configurations alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_T5_BUCKETS = 32
"""Of relative positions, in the first layer's attention."""


def text_parameters(config: Mapping[str, Any]) -> int:
    """Weights of one encoder of a preset."""
    return _t5(config) if config["class"] == "T5EncoderModel" else _clip(config)


def _clip(config: Mapping[str, Any]) -> int:
    width, inner = config["hidden_size"], config["intermediate_size"]
    embeddings = (config["vocab_size"] + config["max_position_embeddings"]) * width
    attention = 4 * (width * width + width)
    mlp = 2 * width * inner + inner + width
    layers = config["num_hidden_layers"] * (attention + mlp + 4 * width)
    projected = config["class"] == "CLIPTextModelWithProjection"
    return int(embeddings + layers + 2 * width + projected * width * config["projection_dim"])


def _t5(config: Mapping[str, Any]) -> int:
    width, heads = config["d_model"], config["num_heads"]
    attention = 4 * width * heads * config["d_kv"]
    # Gated: two projections in, one out.
    mlp = 3 * width * config["d_ff"]
    layers = config["num_layers"] * (attention + mlp + 2 * width)
    return int(config["vocab_size"] * width + layers + _T5_BUCKETS * heads + width)

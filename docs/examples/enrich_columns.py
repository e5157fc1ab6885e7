"""Functions for ``sm-train enrich``: captions, embeddings, an aesthetic score and watermarks.

Each loads a model from the folder that ``--model`` names, once in each process. Put this file into
your folder of code, next to a requirements.txt with the version of transformers that you use::

    sm-train enrich photos/ captions/ --with enrich_columns:caption --model models/blip/
    sm-train enrich photos/ vectors/ --with enrich_columns:embedding --model models/siglip/
    sm-train enrich photos/ scores/ --with enrich_columns:aesthetic --model models/aesthetic/
    sm-train enrich photos/ marks/ --with enrich_columns:watermark --model models/watermark/
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from sm_train import EnrichmentBatch

MAX_WORDS = 40
"""Tokens of a generated caption, at most."""

LABEL = "watermark"
"""Label of a classifier's class of images with a watermark."""


@torch.inference_mode()
def caption(batch: EnrichmentBatch) -> dict[str, Any]:
    """Describe each image: a captioner such as BLIP, in the format of Hugging Face."""
    model, processor = captioner(batch.model, batch.device)
    inputs = processor(images=batch.images, return_tensors="pt").to(batch.device, model.dtype)
    tokens = model.generate(**inputs, max_new_tokens=MAX_WORDS)
    texts = processor.batch_decode(tokens, skip_special_tokens=True)
    return {"generated_caption": [text.strip() for text in texts]}


@torch.inference_mode()
def embedding(batch: EnrichmentBatch) -> dict[str, Any]:
    """Return a normalized vector of each image: CLIP or SigLIP."""
    return {"embedding": image_features(batch).float()}


@torch.inference_mode()
def aesthetic(batch: EnrichmentBatch) -> dict[str, Any]:
    """Return a score of each image: a linear layer on CLIP's vector.

    The folder of the model is that of CLIP, with the layer's weight and bias as ``linear.pt``:
    LAION publishes such layers (github.com/LAION-AI/aesthetic-predictor).
    """
    assert batch.model is not None
    state = torch.load(batch.model / "linear.pt", map_location=batch.device, weights_only=True)
    scores = image_features(batch).float() @ state["weight"].T + state["bias"]
    return {"aesthetic": scores.squeeze(1)}


@torch.inference_mode()
def watermark(batch: EnrichmentBatch) -> dict[str, Any]:
    """Return the probability that an image has a watermark: an image classifier."""
    model, processor = classifier(batch.model, batch.device)
    inputs = processor(images=batch.images, return_tensors="pt").to(batch.device, model.dtype)
    probabilities = model(**inputs).logits.float().softmax(dim=1)
    return {"watermark": probabilities[:, model.config.label2id[LABEL]]}


def image_features(batch: EnrichmentBatch) -> torch.Tensor:
    """Return normalized vectors, (num_images, width)."""
    model, processor = encoder(batch.model, batch.device)
    inputs = processor(images=batch.images, return_tensors="pt").to(batch.device, model.dtype)
    features = model.get_image_features(**inputs)
    # Since version 5, transformers returns the output of the whole tower.
    vectors = features if isinstance(features, torch.Tensor) else features.pooler_output
    return torch.nn.functional.normalize(vectors, dim=1)


@cache
def captioner(folder: Path | None, device: str) -> tuple[Any, Any]:
    """Load a captioner and its processor."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder)
    return model.eval().to(device, precision(device)), AutoProcessor.from_pretrained(folder)


@cache
def encoder(folder: Path | None, device: str) -> tuple[Any, Any]:
    """Load CLIP or SigLIP and its image processor."""
    from transformers import AutoImageProcessor, AutoModel

    model = AutoModel.from_pretrained(folder)
    return model.eval().to(device, precision(device)), AutoImageProcessor.from_pretrained(folder)


@cache
def classifier(folder: Path | None, device: str) -> tuple[Any, Any]:
    """Load an image classifier and its image processor."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(folder)
    return model.eval().to(device, precision(device)), AutoImageProcessor.from_pretrained(folder)


def precision(device: str) -> torch.dtype:
    """Return half the size of fp32 on a GPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32

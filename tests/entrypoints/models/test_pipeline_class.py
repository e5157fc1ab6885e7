"""Final models open in diffusers' standard pipelines and draw what the project's sampler draws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sm_train.entrypoints.models.model_card import TrainingRecord, model_card
from sm_train.entrypoints.models.model_folders import load_model
from sm_train.entrypoints.models.pipeline_class import standard_pipeline

from tests.support.models import build, record, save

pytestmark = pytest.mark.integration

PROMPTS = ["a grey of 3", "a grey of 200"]

STANDARD = [
    pytest.param(
        "tiny-sd2",
        {"prediction_type": "epsilon"},
        "StableDiffusionPipeline",
        marks=pytest.mark.slow,
    ),
    ("tiny-sd2", {"zero_terminal_snr": True}, "StableDiffusionPipeline"),
    ("tiny-sdxl", {}, "StableDiffusionXLPipeline"),
    ("tiny-mmdit", {"timestep_shift": 3.0}, "StableDiffusion3Pipeline"),
]


def draw(pipeline: Any, **options: Any) -> np.ndarray:
    """Return images of :data:`PROMPTS` (B, H, W, C) in 0 to 1."""
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        PROMPTS,
        num_inference_steps=4,
        guidance_scale=4.0,
        generator=[torch.Generator().manual_seed(seed) for seed in (0, 1)],
        output_type="np",
        **options,
    ).images
    return np.asarray(images)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "model", "name"), STANDARD)
def test_a_standard_pipeline_draws_the_same_images(
    tmp_path: Path, preset: str, model: dict[str, Any], name: str
) -> None:
    import diffusers

    folder = save(build(preset, **model), tmp_path)
    assert not (folder / "pipeline.py").exists()
    expected = draw(load_model(folder))
    assert expected.std() > 0.01
    loaders = (diffusers.AutoPipelineForText2Image, getattr(diffusers, name))
    for loader in loaders:
        assert type(loader.from_pretrained(folder)).__name__ == name
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, use_safetensors=True)
    assert type(pipeline).__name__ == name
    np.testing.assert_allclose(draw(pipeline), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_half_precision_components_draw_the_same_images(tmp_path: Path) -> None:
    """Transformers 5 keeps the stored precision, and the network is fp32."""
    from diffusers import DiffusionPipeline

    source = tmp_path / "source"
    for name, component in build("tiny-sdxl").named_components().items():
        if name in ("vae", "text_encoder", "text_encoder_2"):
            component.half()
        if name not in ("unet", "scheduler"):
            component.save_pretrained(source / name)
    folder = save(build("tiny-sdxl", components=source), tmp_path, source)
    expected = draw(load_model(folder))
    pipeline = DiffusionPipeline.from_pretrained(folder)
    np.testing.assert_allclose(draw(pipeline), expected, rtol=0, atol=1e-5)


def test_pixart_that_learned_the_noise_opens_in_its_standard_pipeline(tmp_path: Path) -> None:
    from diffusers import AutoPipelineForText2Image, DiffusionPipeline, PixArtSigmaPipeline

    folder = save(build("tiny-dit", prediction_type="epsilon"), tmp_path)
    for loader in (DiffusionPipeline, AutoPipelineForText2Image, PixArtSigmaPipeline):
        pipeline = loader.from_pretrained(folder)
        assert type(pipeline) is PixArtSigmaPipeline
    # Its sizes are those of published models unless the caller disables the binning.
    images = draw(pipeline, use_resolution_binning=False)
    np.testing.assert_allclose(images, draw(load_model(folder)), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["digits", pytest.param("tiny-dit", marks=pytest.mark.slow)])
def test_models_without_a_standard_pipeline_bring_their_own(tmp_path: Path, preset: str) -> None:
    from diffusers import DiffusionPipeline

    folder = save(build(preset, 8), tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    assert type(pipeline).__name__ == "TextToImagePipeline"
    np.testing.assert_allclose(draw(pipeline), draw(load_model(folder)), rtol=0, atol=1e-5)
    card = (folder / "README.md").read_text()
    assert "from_pretrained(folder, trust_remote_code=True)" in card


def test_pixart_with_size_conditions_has_a_standard_pipeline_at_1024_px_alone() -> None:
    """Diffusers' pipeline passes the size exactly there."""
    network = {"_class_name": "PixArtTransformer2DModel", "use_additional_conditions": True}
    for sample_size, name in ((128, "PixArtAlphaPipeline"), (64, None)):
        network["sample_size"] = sample_size  # type: ignore[assignment]
        chosen = standard_pipeline(network, ["T5EncoderModel"], "DDIMScheduler", has_vae=True)
        assert chosen == name


def front_matter(card: str) -> dict[str, Any]:
    """Return a card's metadata as the Hub reads it."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert match
    document: dict[str, Any] = yaml.safe_load(match[1])
    return document


def card_of(facts: TrainingRecord) -> str:
    return model_card(
        facts,
        pipeline_class="StableDiffusionPipeline",
        standard=True,
        step=12_000,
        weights="ema",
        has_grid=True,
    )


def test_the_model_card_names_run_data_license_and_prompts() -> None:
    facts = record(license="cc-by-nc-4.0", prompts=("a `cat`", "two\nlines"), commit="c0ffee")
    card = card_of(facts)
    assert front_matter(card) == {
        "license": "cc-by-nc-4.0",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["text-to-image", "diffusers", "sm-train"],
    }
    for text in ("12,000", "`d1`", "`b1`", "`c0ffee`", "(samples.png)", "`` a `cat` ``"):
        assert text in card
    assert "2. `two lines`" in card


def test_a_run_without_a_license_says_so() -> None:
    assert front_matter(card_of(record(license=None)))["license"] == "unknown"


def test_the_hub_library_accepts_the_card(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard(card_of(record(license="openrail++")))
    assert card.data.license == "openrail++"
    assert card.data.pipeline_tag == "text-to-image"
    assert card.data.library_name == "diffusers"


def test_model_index_lists_what_the_class_needs(tmp_path: Path) -> None:
    index = json.loads((save(build("tiny-sdxl"), tmp_path) / "model_index.json").read_text())
    assert index["force_zeros_for_empty_prompt"] is False
    assert index["add_watermarker"] is False
    assert "transformer" not in index

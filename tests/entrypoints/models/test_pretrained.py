"""Training starts from pretrained folders as they are published, with real weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sm_train.entrypoints.job_interface.job_config import JobConfigError
from sm_train.entrypoints.models.builder import ModelComponents, require_unchanged
from sm_train.entrypoints.models.component_files import (
    MANIFEST_FILE,
    FileDigest,
    ModelManifest,
    file_sha256,
)
from sm_train.entrypoints.models.model_folders import load_model
from sm_train.entrypoints.models.pipeline import Text, predict

from tests.support.models import build, save


def save_pretrained(
    parts: ModelComponents, folder: Path, *, variant: str | None = None, shard: str = "5GB"
) -> Path:
    """Save components as diffusers and Transformers do; ``variant`` and ``shard`` are theirs."""
    for name, component in parts.named_components().items():
        options: dict[str, Any] = {}
        if isinstance(component, torch.nn.Module):
            options = {"variant": variant, "max_shard_size": shard}
        component.save_pretrained(folder / name, **options)
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(parts: ModelComponents) -> dict[str, torch.Tensor]:
    modules = parts.named_components()
    return {
        f"{name}.{key}": tensor
        for name, module in modules.items()
        if isinstance(module, torch.nn.Module)
        for key, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_the_fp16_variant_is_loaded_alone_and_in_shards(tmp_path: Path, shard: str) -> None:
    original = build("tiny-sdxl")
    folder = save_pretrained(original, tmp_path / "source", variant="fp16", shard=shard)
    names = {path.name for path in (folder / "unet").glob("*.safetensors")}
    assert all("fp16" in name for name in names)
    assert (len(names) > 1) == (shard == "20KB")
    loaded = weights(build("tiny-sdxl", components=folder))
    for name, tensor in weights(original).items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)


def test_full_precision_is_loaded_next_to_the_variant(tmp_path: Path) -> None:
    """Both match the pattern of weight files."""
    original = build("tiny-sd2")
    folder = save_pretrained(original, tmp_path / "source")
    (folder / "unet" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"half")
    loaded = build("tiny-sd2", components=folder)
    for name, tensor in original.network.state_dict().items():
        torch.testing.assert_close(loaded.network.state_dict()[name], tensor, rtol=0, atol=0)


def test_the_pretrained_scheduler_decides_what_is_trained_and_saved(tmp_path: Path) -> None:
    """An epsilon model under a preset whose default is the velocity."""
    folder = save_pretrained(build("tiny-sd2", prediction_type="epsilon"), tmp_path / "source")
    edit(folder / "scheduler" / "scheduler_config.json", beta_schedule="linear", beta_end=0.02)
    parts = build("tiny-sd2", components=folder)
    assert parts.objective.prediction_type == "epsilon"
    noisy = parts.objective.make_target(
        torch.zeros(1, 4, 8, 8), torch.ones(1, 4, 8, 8), torch.tensor([0.5]).double().numpy()
    )
    torch.testing.assert_close(noisy.target, torch.ones(1, 4, 8, 8))
    betas = torch.linspace(0.00085, 0.02, 1000, dtype=torch.float64)
    level = (1 - (1 - betas).cumprod(0)[500]).sqrt().float()
    torch.testing.assert_close(noisy.noisy.flatten()[0], level)
    saved = save(parts, tmp_path)
    scheduler = json.loads((saved / "scheduler" / "scheduler_config.json").read_text())
    assert (scheduler["prediction_type"], scheduler["beta_schedule"]) == ("epsilon", "linear")


def test_a_contradiction_ends_the_job_with_one_line(tmp_path: Path) -> None:
    folder = save_pretrained(build("tiny-sd2", prediction_type="epsilon"), tmp_path / "source")
    with pytest.raises(JobConfigError, match=r"^model\.components: model\.prediction_type: "):
        build("tiny-sd2", components=folder, prediction_type="v_prediction")


def test_the_learned_variance_of_pixart_is_left_out(tmp_path: Path) -> None:
    """As published: an earlier class name, and twice the output channels."""
    from diffusers import PixArtTransformer2DModel

    parts = build("tiny-dit", prediction_type="epsilon")
    folder = save_pretrained(parts, tmp_path / "source")
    config = {**parts.network.config, "out_channels": 8}
    torch.manual_seed(1)
    published = PixArtTransformer2DModel.from_config(config).eval()
    published.save_pretrained(folder / "transformer")
    edit(folder / "transformer" / "config.json", _class_name="Transformer2DModel")
    loaded = build("tiny-dit", components=folder)
    assert loaded.network.config.out_channels == 4
    noisy, states = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 64)
    with torch.no_grad():
        mean = predict(published, noisy, torch.tensor([3, 700]), Text(states), 8)[:, :4]
        trained = predict(loaded.network.eval(), noisy, torch.tensor([3, 700]), Text(states), 8)
    torch.testing.assert_close(trained, mean)
    saved = save(loaded, tmp_path)
    shapes = load_file(saved / "transformer" / "diffusion_pytorch_model.safetensors")
    assert shapes["proj_out.weight"].shape[0] == 2 * 2 * 4


def test_pixart_gets_the_image_size_that_it_was_trained_with() -> None:
    from diffusers import PixArtTransformer2DModel

    config = {**build("tiny-dit").network.config, "use_additional_conditions": True}
    # The size's three embeddings share the width.
    config |= {"num_attention_heads": 3, "cross_attention_dim": 48}
    network = PixArtTransformer2DModel.from_config(config)
    states, noisy = torch.randn(1, 5, 64), torch.randn(1, 4, 8, 16)
    with torch.no_grad():
        own = predict(network.eval(), noisy, torch.tensor([3]), Text(states), 8)
        added = {
            "resolution": torch.tensor([[64.0, 128.0]]),
            "aspect_ratio": torch.tensor([[0.5]]),
        }
        expected = network(noisy, states, torch.tensor([3]), added_cond_kwargs=added).sample
    torch.testing.assert_close(own, expected)


@pytest.mark.slow
def test_sd3_without_t5_draws_what_diffusers_draws(tmp_path: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    parts = build("tiny-mmdit")
    source = save_pretrained(parts, tmp_path / "source")
    for name in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(source / name)
    saved = save(build("tiny-mmdit", components=source), tmp_path, source)
    pipeline = load_model(saved)
    expected = StableDiffusion3Pipeline.from_pretrained(
        saved, text_encoder_3=None, tokenizer_3=None
    )
    assert "(folder, text_encoder_3=None, tokenizer_3=None)" in (saved / "README.md").read_text()
    images = [
        assembled(
            "a grey of 3",
            num_inference_steps=2,
            guidance_scale=4.0,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images
        for assembled in (pipeline, expected)
    ]
    torch.testing.assert_close(*map(torch.from_numpy, images), rtol=0, atol=1e-5)


def test_files_that_changed_since_the_copy_end_the_job(tmp_path: Path) -> None:
    folder = save_pretrained(build("tiny-sd2"), tmp_path / "source")
    files = {
        path.relative_to(folder).as_posix(): FileDigest(path.stat().st_size, file_sha256(path))
        for path in folder.rglob("*")
        if path.is_file()
    }
    (folder / MANIFEST_FILE).write_text(ModelManifest("org/model", "0" * 40, files).to_json())
    require_unchanged(folder)
    require_unchanged(None)
    weights_file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    with pytest.raises(JobConfigError, match="has changed since it was copied"):
        require_unchanged(folder)

"""The presets' networks and components: size, initialization, loading, text encoding."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.data_loading.sampler import DataPosition
from sm_train.entrypoints.distributed.fsdp import mesh_shape
from sm_train.entrypoints.job_interface.job_config import (
    JobConfigError,
    ModelConfig,
    read_job_config,
)
from sm_train.entrypoints.models.builder import build_components, load_text_encoders
from sm_train.entrypoints.models.components import PRESETS, read_preset
from sm_train.entrypoints.models.pipeline import Text, predict
from sm_train.entrypoints.models.trained_network import Network, resize_positions
from sm_train.entrypoints.training import model_inputs
from sm_train.entrypoints.training.model_inputs import ModelInputs
from sm_train.entrypoints.training.parallelize import ParallelPlan

from tests.support.cluster.training_jobs import tiny_run
from tests.support.run_documents import write_job_file

CPU = torch.device("cpu")
FAMILIES = ["digits", "tiny-pixels", "tiny-sd2", "tiny-sdxl", "tiny-dit", "tiny-mmdit"]


def model(preset: str) -> ModelConfig:
    return ModelConfig(preset, None, False, None, None)


def network(preset: str, side: int = 8, folder: Path | None = None, seed: int = 0) -> Network:
    built = Network(read_preset(preset)["network"], folder, side)
    built.materialize(CPU, seed)
    return built


@pytest.mark.parametrize(
    ("preset", "millions", "tolerance"),
    [
        # The sizes that the models' papers and cards state; mmdit-20b is not published.
        ("sd2", 865.9, 0.0001),
        ("sdxl", 2567, 0.001),
        ("dit-xl", 611, 0.001),
        ("mmdit-2b", 2028, 0.001),
        ("mmdit-8b", 8057, 0.001),
        ("mmdit-20b", 20_000, 0.05),
    ],
)
def test_presets_have_their_published_size(preset: str, millions: float, tolerance: float) -> None:
    weights = list(Network(read_preset(preset)["network"], None, 64).module.parameters())
    assert all(weight.is_meta for weight in weights)
    assert sum(weight.numel() for weight in weights) == pytest.approx(1e6 * millions, rel=tolerance)


def test_every_preset_resolves_its_shared_components() -> None:
    for path in PRESETS.glob("*.json"):
        preset = read_preset(path.stem)
        assert preset["network"]["class"].endswith(("ConditionModel", "Transformer2DModel"))
        assert all(isinstance(encoder, dict) for encoder in preset["text_encoders"])


@pytest.mark.parametrize("preset", FAMILIES)
def test_initialization_is_that_of_diffusers_except_for_zeros(preset: str) -> None:
    """Each weight has diffusers' standard deviation, or is zero as its paper says."""
    import diffusers

    ours = network(preset)
    config = read_preset(preset)["network"] | {"sample_size": 8}
    theirs = getattr(diffusers, config.pop("class")).from_config(config).state_dict()
    zeros = []
    for name, weight in ours.module.named_parameters():
        other = theirs[name]
        if not weight.any() and other.any():
            zeros.append(name)
        elif weight.numel() >= 64:
            assert float(weight.detach().std()) == pytest.approx(float(other.std()), rel=0.4)
    ends = {name.rpartition(".")[0].rpartition(".")[2] for name in zeros}
    expected = {
        "digits": set(),
        "tiny-pixels": set(),
        "tiny-sd2": set(),
        "tiny-sdxl": set(),
        "tiny-dit": {"linear", "proj_out"},
        "tiny-mmdit": {"linear", "proj_out"},
    }
    assert ends == expected[preset]


def test_initialization_depends_on_seed_and_name() -> None:
    first_seed, same_seed, other_seed = (
        network("tiny-sd2", seed=seed).module for seed in (3, 3, 4)
    )
    for name, weight in first_seed.state_dict().items():
        assert torch.equal(weight, same_seed.state_dict()[name])
    weight = "conv_in.weight"
    assert not torch.equal(first_seed.state_dict()[weight], other_seed.state_dict()[weight])
    first, second = (
        first_seed.state_dict()[f"down_blocks.0.resnets.0.{name}.weight"]
        for name in ("conv1", "time_emb_proj")
    )
    assert not torch.equal(first.flatten()[:9], second.flatten()[:9])


@pytest.mark.slow
@pytest.mark.parametrize("preset", FAMILIES)
def test_saved_network_loads_with_equal_weights(preset: str, tmp_path: Path) -> None:
    saved = network(preset, seed=5)
    saved.module.save_pretrained(tmp_path, max_shard_size="100KB")
    loaded = network(preset, folder=tmp_path)
    for name, weight in saved.module.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], weight), name
    assert loaded.module.config.sample_size == 8


def test_folder_of_another_network_is_refused(tmp_path: Path) -> None:
    network("tiny-sd2").module.save_pretrained(tmp_path / "unet")
    with pytest.raises(JobConfigError, match="is a UNet2DConditionModel, and the preset's"):
        network("tiny-dit", folder=tmp_path / "unet")
    (tmp_path / "none").mkdir()
    with pytest.raises(JobConfigError, match="has no readable config"):
        network("tiny-sd2", folder=tmp_path / "none")
    config = tmp_path / "unet" / "config.json"
    deeper = json.loads(config.read_text()) | {"layers_per_block": 2}
    config.write_text(json.dumps(deeper))
    with pytest.raises(JobConfigError, match="has no weight"):
        network("tiny-sd2", folder=tmp_path / "unet")


def test_positions_are_resized_about_the_center() -> None:
    """A linear table gets half the slope for an image of twice the size."""
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    table = torch.stack([rows, columns], dim=-1).reshape(1, 64, 2)
    resized = resize_positions(table, 2.0).reshape(8, 8, 2)
    expected = 3.5 + (torch.arange(8.0) - 3.5) / 2
    inner = slice(2, 6)
    torch.testing.assert_close(resized[inner, 3, 0], expected[inner], rtol=0, atol=0.05)
    torch.testing.assert_close(resized[3, inner, 1], expected[inner], rtol=0, atol=0.05)
    assert torch.equal(resize_positions(table, 1.0).round(decimals=4), table)


@pytest.mark.parametrize("preset", ["tiny-mmdit", "tiny-dit"])
def test_larger_stage_covers_the_positions_of_the_smaller(preset: str, tmp_path: Path) -> None:
    small = network(preset, side=8)
    small.module.save_pretrained(tmp_path)
    large = network(preset, side=16, folder=tmp_path)
    assert large.module.config.sample_size == 16
    before, after = positions(small.module, 4), positions(large.module, 8)
    # The mean of 2 × 2 positions of the larger image is close to one of the smaller.
    pooled = torch.nn.functional.avg_pool2d(after.permute(2, 0, 1), 2).permute(1, 2, 0)
    similarity = torch.nn.functional.cosine_similarity(pooled, before, dim=-1)
    assert float(similarity.min()) > 0.8


def positions(module: Any, side: int) -> torch.Tensor:
    """The positions (side, side, D) of an image of ``side`` × ``side`` patches."""
    embedding = module.pos_embed
    if embedding.pos_embed_max_size:
        table = embedding.cropped_pos_embed(2 * side, 2 * side)
    else:
        table = embedding.pos_embed
    reshaped: torch.Tensor = table.reshape(side, side, -1)
    return reshaped


@pytest.mark.parametrize(
    ("stage", "component", "world_size", "gpu_gib", "expected"),
    [
        ({}, "unet", 8, 80, ParallelPlan("none", False, False, True, True, False, True)),
        ({}, "transformer", 8, 80, ParallelPlan("none", False, False, False, True, False, True)),
        ({}, "unet", 2, None, ParallelPlan("none", False, False, False, False, False, True)),
        (
            {"sharding": "full_shard", "activation_checkpointing": True},
            "unet",
            8,
            80,
            ParallelPlan("full_shard", True, False, False, True, False, True),
        ),
        # Unsharded gradients of 8 billion weights are 30 GiB: they fit in 80 GiB, not in 40.
        (
            {"sharding": "full_shard", "preset": "mmdit-8b", "resolution": 16},
            "transformer",
            32,
            80,
            ParallelPlan("full_shard", False, False, False, True, False, True),
        ),
        (
            {"sharding": "full_shard", "preset": "mmdit-8b", "resolution": 16},
            "transformer",
            32,
            40,
            ParallelPlan("full_shard", False, False, False, True, False, False),
        ),
        (
            {"sharding": "hybrid_shard", "preset": "mmdit-20b", "resolution": 16},
            "transformer",
            128,
            80,
            ParallelPlan("hybrid_shard", False, False, False, True, False, False),
        ),
        # A single process cannot shard.
        (
            {"sharding": "full_shard"},
            "unet",
            1,
            None,
            ParallelPlan("none", False, False, False, False, False, True),
        ),
    ],
)
def test_parallel_plan_follows_from_stage_and_hardware(
    tmp_path: Path,
    stage: dict[str, Any],
    component: str,
    world_size: int,
    gpu_gib: int | None,
    expected: ParallelPlan,
) -> None:
    run = tiny_run(max_steps=1, precision="bf16", compile=False, **stage)
    settings = read_job_config(write_job_file(tmp_path, run), "8px")
    memory = None if gpu_gib is None else gpu_gib * 2**30
    found = ParallelPlan.choose(settings, component, world_size, 8, memory)
    # Reasons, text encoders and modulation have tests of their own.
    assert astuple(found)[:7] == astuple(expected)[:7]
    exchanging = {"mmdit-8b", "mmdit-20b"} if found.sharding != "none" else set()
    assert (found.modulation == "exchanged") == (stage.get("preset") in exchanging)


@pytest.mark.parametrize(
    ("strategy", "world_size", "per_node", "shape"),
    [
        ("full_shard", 16, 8, (16,)),
        ("shard_grad_op", 16, 8, (16,)),
        ("hybrid_shard", 16, 8, (2, 8)),
        ("hybrid_shard", 8, 8, (8,)),
    ],
)
def test_mesh_shape_by_sharding_strategy(
    strategy: str, world_size: int, per_node: int, shape: tuple[int, ...]
) -> None:
    assert mesh_shape(strategy, world_size, per_node)[0] == shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "random_frozen"),
    [
        ("digits", ()),
        ("tiny-sd2", ("text_encoder", "vae")),
        ("tiny-sdxl", ("text_encoder", "text_encoder_2", "vae")),
        ("tiny-mmdit", ("text_encoder", "text_encoder_2", "text_encoder_3", "vae")),
    ],
)
def test_each_family_predicts_and_lists_random_components(
    preset: str, random_frozen: tuple[str, ...]
) -> None:
    parts = build_components(model(preset), 16, components=None, previous=None)
    assert parts.random_frozen == random_frozen
    parts.network_init.materialize(CPU, 0)
    text = parts.text_encoders.encode(parts.text_encoders.tokenize(["a word", "two words"]))
    config = parts.network.config
    noisy = torch.randn(2, config.in_channels, config.sample_size, config.sample_size)
    prediction = predict(
        parts.network, noisy, torch.tensor([1.0, 500.0]), text, parts.vae_scale_factor
    )
    assert prediction.shape == noisy.shape


def test_images_are_encoded_in_chunks_and_sampled_with_their_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = build_components(model("tiny-sd2"), 16, components=None, previous=None)
    pixels = torch.randint(0, 255, (5, 16, 16, 3), dtype=torch.uint8)
    noise = torch.randn(parts.sample_rng(0).shape(5, 16, 16))
    batch = Batch(
        pixels,
        ["a word"] * 5,
        DataPosition(),
        (),
        0,
        ((0, 0),) * 5,
        ("a.tar 0",) * 5,
        np.full(5, 0.5),
        np.ones(5),
        noise,
        tokens=tuple(ids.numpy() for ids in parts.text_encoders.tokenize(["a word"] * 5)),
    )
    sizes: list[int] = []
    encode = parts.vae.encode
    monkeypatch.setattr(
        parts.vae, "encode", lambda images: sizes.append(len(images)) or encode(images)
    )
    monkeypatch.setattr(model_inputs, "images_at_once", lambda pixels: pixels // 128)
    target, _ = ModelInputs(parts, CPU, 0.0).prepare(batch)
    assert sizes == [2, 2, 1]
    with torch.no_grad():
        moments = encode(pixels.permute(0, 3, 1, 2) / 127.5 - 1.0).latent_dist
    latents = (moments.mean + moments.std * noise[1]) * parts.vae.config.scaling_factor
    expected = parts.objective.make_target(latents, noise[0], batch.timestep_uniform)
    torch.testing.assert_close(target.noisy, expected.noisy)
    torch.testing.assert_close(target.target, expected.target)


def test_text_encoders_are_joined_as_in_diffusers_pipelines() -> None:
    """Stable Diffusion 3: CLIP's second to last layers along the width, then T5's tokens."""
    parts = build_components(model("tiny-mmdit"), 16, components=None, previous=None)
    ids = parts.text_encoders.tokenize(["a word"])
    states, pooled, _ = parts.text_encoders.encode(ids)
    clip_l, clip_g, t5 = parts.text_encoders.encoders
    clip = [
        encoder(tokens, output_hidden_states=True)
        for encoder, tokens in zip((clip_l, clip_g), ids[:2], strict=True)
    ]
    tokens = clip[0].hidden_states[-2].shape[1]
    assert torch.equal(states[:, :tokens, :32], clip[0].hidden_states[-2])
    assert torch.equal(states[:, :tokens, 32:64], clip[1].hidden_states[-2])
    assert not states[:, :tokens, 64:].any()
    assert torch.equal(states[:, tokens:], t5(ids[2]).last_hidden_state)
    assert pooled is not None
    assert torch.equal(pooled, torch.cat([output.text_embeds for output in clip], dim=1))


def test_text_encoder_of_unknown_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(JobConfigError, match="class BertModel is not supported"):
        load_text_encoders(tmp_path)
    assert load_text_encoders(tmp_path / "none") is None


def test_sdxl_gets_the_image_size_in_pixels() -> None:
    sdxl = network("tiny-sdxl")
    sizes: list[torch.Tensor] = []
    sdxl.module.add_time_proj.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0]))
    text = Text(torch.zeros(1, 4, 64), torch.zeros(1, 32))
    predict(sdxl.module, torch.zeros(1, 4, 8, 16), torch.zeros(1), text, 2)
    assert sizes[0].tolist() == [16, 32, 0, 0, 16, 32]

"""The networks of the presets: real classes, their size, how they begin and what they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sm_train.entrypoints.common.job_config import JobConfigError, ModelConfig, read_job_config
from sm_train.entrypoints.data.batches import Batch
from sm_train.entrypoints.data.sampler import DataPosition
from sm_train.entrypoints.distributed.fsdp import mesh_shape
from sm_train.entrypoints.models.builder import build, load_text_encoders
from sm_train.entrypoints.models.components import PRESETS, read_preset
from sm_train.entrypoints.models.network import Network, stretched
from sm_train.entrypoints.models.pipeline import Text, predict
from sm_train.entrypoints.training import model_inputs
from sm_train.entrypoints.training.model_inputs import ModelInputs
from sm_train.entrypoints.training.parallelize import ParallelPlan

from tests.support.cluster.training_jobs import tiny_run
from tests.support.run_documents import write_job_file

CPU = torch.device("cpu")
FAMILIES = ["digits", "tiny-sd2", "tiny-sdxl", "tiny-dit", "tiny-mmdit"]


def model(preset: str) -> ModelConfig:
    return ModelConfig(preset, None, False, None, None)


def network(preset: str, side: int = 8, folder: Path | None = None, seed: int = 0) -> Network:
    made = Network(read_preset(preset)["network"], folder, side)
    made.fill(CPU, seed)
    return made


@pytest.mark.parametrize(
    ("preset", "millions", "tolerance"),
    [
        # The sizes that the models' papers and cards state; 20 billion is our own scale.
        ("sd2", 865.9, 0.0001),
        ("sdxl", 2567, 0.001),
        ("dit-xl", 611, 0.001),
        ("mmdit-2b", 2028, 0.001),
        ("mmdit-8b", 8057, 0.001),
        ("mmdit-20b", 20_000, 0.05),
    ],
)
def test_presets_have_their_published_size(preset: str, millions: float, tolerance: float) -> None:
    made = Network(read_preset(preset)["network"], None, 64)
    weights = list(made.module.parameters())
    assert all(weight.is_meta for weight in weights)
    found = sum(weight.numel() for weight in weights)
    assert found == pytest.approx(1e6 * millions, rel=tolerance)


def test_every_preset_names_parts_that_are_there() -> None:
    for path in PRESETS.glob("*.json"):
        preset = read_preset(path.stem)
        assert preset["network"]["class"].endswith(("ConditionModel", "Transformer2DModel"))
        assert all(isinstance(encoder, dict) for encoder in preset["text_encoders"])


@pytest.mark.parametrize("preset", FAMILIES)
def test_first_values_are_those_of_the_classes_but_for_zeros(preset: str) -> None:
    """Each weight has the spread that diffusers gives it, or begins as zero by its paper."""
    import diffusers

    made = network(preset)
    config = read_preset(preset)["network"] | {"sample_size": 8}
    theirs = getattr(diffusers, config.pop("class")).from_config(config).state_dict()
    zeros = []
    for name, weight in made.module.named_parameters():
        other = theirs[name]
        if not weight.any() and other.any():
            zeros.append(name)
        elif weight.numel() >= 64:
            assert float(weight.detach().std()) == pytest.approx(float(other.std()), rel=0.4)
    ends = {name.rpartition(".")[0].rpartition(".")[2] for name in zeros}
    expected = {
        "digits": set(),
        "tiny-sd2": set(),
        "tiny-sdxl": set(),
        "tiny-dit": {"linear", "proj_out"},
        "tiny-mmdit": {"linear", "proj_out"},
    }
    assert ends == expected[preset]


def test_first_values_belong_to_the_seed_and_the_name() -> None:
    one, same, other = (network("tiny-sd2", seed=seed).module for seed in (3, 3, 4))
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
    weight = "conv_in.weight"
    assert not torch.equal(one.state_dict()[weight], other.state_dict()[weight])
    first, second = (
        one.state_dict()[f"down_blocks.0.resnets.0.{name}.weight"]
        for name in ("conv1", "time_emb_proj")
    )
    assert not torch.equal(first.flatten()[:9], second.flatten()[:9])


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_saved_network_is_read_again_weight_by_weight(preset: str, tmp_path: Path) -> None:
    made = network(preset, seed=5)
    made.module.save_pretrained(tmp_path, max_shard_size="100KB")
    again = network(preset, folder=tmp_path)
    for name, weight in made.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], weight), name
    assert again.module.config.sample_size == 8


def test_a_folder_of_another_network_is_refused_by_name(tmp_path: Path) -> None:
    network("tiny-sd2").module.save_pretrained(tmp_path / "unet")
    with pytest.raises(JobConfigError, match="is a UNet2DConditionModel, and the preset's"):
        network("tiny-dit", folder=tmp_path / "unet")
    (tmp_path / "none").mkdir()
    with pytest.raises(JobConfigError, match="has no config"):
        network("tiny-sd2", folder=tmp_path / "none")
    config = tmp_path / "unet" / "config.json"
    deeper = json.loads(config.read_text()) | {"layers_per_block": 2}
    config.write_text(json.dumps(deeper))
    with pytest.raises(JobConfigError, match="has no weight"):
        network("tiny-sd2", folder=tmp_path / "unet")


# ------------------------------------------------------------------ positions


def test_positions_stretch_about_the_centre() -> None:
    """A table that rises evenly rises half as fast for an image of twice the size."""
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    table = torch.stack([rows, columns], dim=-1).reshape(1, 64, 2)
    grown = stretched(table, 2.0).reshape(8, 8, 2)
    expected = 3.5 + (torch.arange(8.0) - 3.5) / 2
    inner = slice(2, 6)
    torch.testing.assert_close(grown[inner, 3, 0], expected[inner], rtol=0, atol=0.05)
    torch.testing.assert_close(grown[3, inner, 1], expected[inner], rtol=0, atol=0.05)
    assert torch.equal(stretched(table, 1.0).round(decimals=4), table)


@pytest.mark.parametrize("preset", ["tiny-mmdit", "tiny-dit"])
def test_a_larger_stage_spans_the_positions_of_the_smaller(preset: str, tmp_path: Path) -> None:
    small = network(preset, side=8)
    small.module.save_pretrained(tmp_path)
    large = network(preset, side=16, folder=tmp_path)
    assert large.module.config.sample_size == 16
    before, after = (positions(one.module, side) for one, side in ((small, 4), (large, 8)))
    # Every second position of the larger image lies near one of the smaller.
    pooled = torch.nn.functional.avg_pool2d(after.permute(2, 0, 1), 2).permute(1, 2, 0)
    similarity = torch.nn.functional.cosine_similarity(pooled, before, dim=-1)
    assert float(similarity.min()) > 0.8


def positions(module: Any, side: int) -> torch.Tensor:
    """What is added to the patches of an image of ``side`` × ``side`` of them."""
    embedding = module.pos_embed
    if embedding.pos_embed_max_size:
        table = embedding.cropped_pos_embed(2 * side, 2 * side)
    else:
        table = embedding.pos_embed
    found: torch.Tensor = table.reshape(side, side, -1)
    return found


# ------------------------------------------------------------------ where it learns


@pytest.mark.parametrize(
    ("stage", "part", "processes", "gpu_gib", "expected"),
    [
        ({}, "unet", 8, 80, ParallelPlan("none", False, False, True, True, True)),
        ({}, "transformer", 8, 80, ParallelPlan("none", False, False, False, True, True)),
        ({}, "unet", 2, None, ParallelPlan("none", False, False, False, False, True)),
        (
            {"sharding": "full_shard", "activation_checkpointing": True},
            "unet",
            8,
            80,
            ParallelPlan("full_shard", True, False, False, True, True),
        ),
        # Whole gradients of 8 billion weights are 30 GiB, beside as much of states on two GPUs.
        (
            {"sharding": "full_shard", "preset": "mmdit-8b"},
            "transformer",
            32,
            80,
            ParallelPlan("full_shard", False, False, False, True, True),
        ),
        (
            {"sharding": "full_shard", "preset": "mmdit-8b"},
            "transformer",
            32,
            40,
            ParallelPlan("full_shard", False, False, False, True, False),
        ),
        (
            {"sharding": "hybrid_shard", "preset": "mmdit-20b"},
            "transformer",
            128,
            80,
            ParallelPlan("hybrid_shard", False, False, False, True, False),
        ),
        # There is nobody to split with.
        (
            {"sharding": "full_shard"},
            "unet",
            1,
            None,
            ParallelPlan("none", False, False, False, False, True),
        ),
    ],
)
def test_how_a_model_is_placed_follows_from_what_is_there(
    tmp_path: Path,
    stage: dict[str, Any],
    part: str,
    processes: int,
    gpu_gib: int | None,
    expected: ParallelPlan,
) -> None:
    run = tiny_run(max_steps=1, precision="bf16", **stage)
    settings = read_job_config(write_job_file(tmp_path, run), "8px")
    memory = None if gpu_gib is None else gpu_gib * 2**30
    assert ParallelPlan.choose(settings, part, processes, 8, memory) == expected


@pytest.mark.parametrize(
    ("strategy", "world_size", "per_node", "shape"),
    [
        ("full_shard", 16, 8, (16,)),
        ("shard_grad_op", 16, 8, (16,)),
        ("hybrid_shard", 16, 8, (2, 8)),
        ("hybrid_shard", 8, 8, (8,)),
    ],
)
def test_what_is_split_along_and_what_is_replicated(
    strategy: str, world_size: int, per_node: int, shape: tuple[int, ...]
) -> None:
    assert mesh_shape(strategy, world_size, per_node)[0] == shape


# ------------------------------------------------------------------ parts around the network


@pytest.mark.parametrize(
    ("preset", "random_parts"),
    [
        ("digits", ()),
        ("tiny-sd2", ("text_encoder", "vae")),
        ("tiny-sdxl", ("text_encoder", "text_encoder_2", "vae")),
        ("tiny-mmdit", ("text_encoder", "text_encoder_2", "text_encoder_3", "vae")),
    ],
)
def test_each_family_answers_and_says_what_is_random(
    preset: str, random_parts: tuple[str, ...]
) -> None:
    parts = build(model(preset), 16, components=None, previous=None)
    assert parts.random_frozen == random_parts
    parts.built.fill(CPU, 0)
    text = parts.text.encode(parts.text.tokenize(["a word", "two words"]))
    config = parts.network.config
    noisy = torch.randn(2, config.in_channels, config.sample_size, config.sample_size)
    answer = predict(parts.network, noisy, torch.tensor([1.0, 500.0]), text, parts.scale)
    assert answer.shape == noisy.shape


def test_images_are_encoded_in_pieces_and_drawn_with_their_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = build(model("tiny-sd2"), 16, components=None, previous=None)
    pixels = torch.randint(0, 255, (5, 16, 16, 3), dtype=torch.uint8)
    noise = torch.randn(parts.draws(0).shape(5, 16, 16))
    batch = Batch(
        pixels,
        ["a word"] * 5,
        DataPosition(),
        (),
        0,
        ((0, 0),) * 5,
        np.full(5, 0.5),
        np.ones(5),
        noise,
        tokens=tuple(ids.numpy() for ids in parts.text.tokenize(["a word"] * 5)),
    )
    sizes: list[int] = []
    encode = parts.vae.encode
    monkeypatch.setattr(parts.vae, "encode", lambda one: sizes.append(len(one)) or encode(one))
    monkeypatch.setattr(model_inputs, "images_at_once", lambda pixels: pixels // 128)
    task, _ = ModelInputs(parts, CPU, 0.0).prepare(batch)
    assert sizes == [2, 2, 1]
    with torch.no_grad():
        whole = encode(pixels.permute(0, 3, 1, 2) / 127.5 - 1.0).latent_dist
    latents = (whole.mean + whole.std * noise[1]) * parts.vae.config.scaling_factor
    expected = parts.objective.task(latents, noise[0], batch.timestep_uniform)
    torch.testing.assert_close(task.noisy, expected.noisy)
    torch.testing.assert_close(task.target, expected.target)


def test_joined_text_encoders_give_what_diffusers_pipelines_make_of_them() -> None:
    """Stable Diffusion 3: CLIP's layers before the last, side by side, T5's tokens behind."""
    parts = build(model("tiny-mmdit"), 16, components=None, previous=None)
    ids = parts.text.tokenize(["a word"])
    states, pooled = parts.text.encode(ids)
    one, two, t5 = parts.text.encoders
    clip = [
        encoder(tokens, output_hidden_states=True)
        for encoder, tokens in zip((one, two), ids[:2], strict=True)
    ]
    tokens = clip[0].hidden_states[-2].shape[1]
    assert torch.equal(states[:, :tokens, :32], clip[0].hidden_states[-2])
    assert torch.equal(states[:, :tokens, 32:64], clip[1].hidden_states[-2])
    assert not states[:, :tokens, 64:].any()
    assert torch.equal(states[:, tokens:], t5(ids[2]).last_hidden_state)
    assert pooled is not None
    assert torch.equal(pooled, torch.cat([one.text_embeds for one in clip], dim=1))


def test_text_encoders_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(JobConfigError, match="is a BertModel; CLIP and T5"):
        load_text_encoders(tmp_path)
    assert load_text_encoders(tmp_path / "none") is None


def test_sizes_reach_sdxl() -> None:
    """Its size conditioning is that of the image in pixels, not of the latents."""
    made = network("tiny-sdxl")
    seen: list[torch.Tensor] = []
    made.module.add_time_proj.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    text = Text(torch.zeros(1, 4, 64), torch.zeros(1, 32))
    predict(made.module, torch.zeros(1, 4, 8, 16), torch.zeros(1), text, 2)
    assert seen[0].tolist() == [16, 32, 0, 0, 16, 32]

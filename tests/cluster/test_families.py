"""Each family of networks, from training to images, with and without precomputed latents."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.data.shard_index import ShardIndex

from tests.conftest import Cli
from tests.support.cluster.training_jobs import Job, losses, png, tiny_run, write_shards
from tests.support.image_files import write_pair

FAMILIES = [
    "tiny-mmdit",
    pytest.param("tiny-sdxl", marks=pytest.mark.slow),
    pytest.param("tiny-sd2", marks=pytest.mark.slow),
    pytest.param("tiny-dit", marks=pytest.mark.slow),
]


def trained(
    folder: Path, preset: str, processes: int = 1, **settings: Any
) -> tuple[Job, list[dict[str, Any]]]:
    own = {"max_steps": 3, "checkpoint_every": 3, "per_device_batch_size": 2}
    job = Job(folder, tiny_run(**(own | {"preset": preset} | settings)))
    write_shards(job.train_channel, shards=2, each=8)
    code, events, text = job.run(processes)
    assert code == 0, text
    return job, events


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Job, list[dict[str, Any]]]:
    job, events = trained(tmp_path_factory.mktemp("family"), request.param, processes=2)
    return request.param, job, events


def test_diffusers_alone_draws_with_the_final_model(
    family: tuple[str, Job, list[dict[str, Any]]],
) -> None:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(family[1].base / "model", trust_remote_code=True)
    for guidance in (1.0, 4.0):
        [image] = pipeline("a grey of 3", num_inference_steps=2, guidance_scale=guidance).images
        assert image.size == (8, 8)


@pytest.mark.slow
def test_a_checkpoint_and_the_final_model_draw_the_same(
    cli: Cli, tmp_path: Path, family: tuple[str, Job, list[dict[str, Any]]]
) -> None:
    (tmp_path / "prompts.txt").write_text("a grey of 1\na grey of 2\n")
    pictures = []
    for place in (family[1].base / "model", family[1].checkpoints / "step-00000003"):
        result = cli("sample", place, "--prompts", "prompts.txt", "--steps", "3", "--out", "g.png")
        assert result.returncode == 0, result.stderr
        pictures.append((tmp_path / "g.png").read_bytes())
    assert pictures[0] == pictures[1]


@pytest.mark.slow
def test_precomputed_latents_and_texts_train_the_same(
    cli: Cli, tmp_path: Path, family: tuple[str, Job, list[dict[str, Any]]]
) -> None:
    """Half precision keeps eleven bits of what training computes itself."""
    preset, first, _ = family
    for number in range(8):
        write_pair(tmp_path / "in", f"{number:02}.png", png(30 * number), f"a grey of {number}")
    frame = first.checkpoints / "components"
    found = {}
    for kind, options in (
        ("precomputed latents", ("--latents", frame, "--resolution", "8")),
        ("images", ()),
    ):
        packed = tmp_path / kind
        done = cli("pack", "in", packed, *options, timeout=180)
        assert done.returncode == 0, done.stderr
        latents = ShardIndex(packed / "index.parquet").header.options.get("latents") or {}
        assert ("pooled" in latents) == (bool(options) and preset in ("tiny-sdxl", "tiny-mmdit"))
        found[kind] = losses(events_of(packed, frame, preset, kind))
    assert found["images"] == pytest.approx(found["precomputed latents"], rel=2e-3)


def events_of(packed: Path, frame: Path, preset: str, inputs: str) -> list[dict[str, Any]]:
    """Of a job on packed shards with the frozen parts of ``frame``, which takes ``inputs``."""
    run = tiny_run(preset=preset, max_steps=3, caption_dropout=0.5, per_device_batch_size=4)
    job = Job(packed / "job", run)
    channels = job.base / "input" / "data"
    shutil.copytree(packed / "shards", channels / "train")
    (channels / "index").mkdir()
    shutil.copy(packed / "index.parquet", channels / "index")
    (channels / "model").symlink_to(frame)
    code, events, text = job.run()
    assert code == 0, text
    assert next(one for one in events if one["kind"] == "start")["input_kind"] == inputs
    return events


@pytest.mark.slow
@pytest.mark.parametrize("preset", FAMILIES)
def test_computing_activations_again_changes_no_loss(tmp_path: Path, preset: str) -> None:
    found = [
        losses(trained(tmp_path / str(again), preset, activation_checkpointing=again)[1])
        for again in (False, True)
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_compiled_blocks_train_the_same(tmp_path: Path) -> None:
    """Slow: compiling takes three quarters of a minute."""
    found = [
        losses(trained(tmp_path / str(compiled), "tiny-mmdit", compile=compiled)[1])
        for compiled in (False, True)
    ]
    # Fused kernels round elsewhere.
    assert found[1] == pytest.approx(found[0], rel=1e-4)

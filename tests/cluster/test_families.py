"""Each model family from training to images, with and without precomputed latents."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.shards.shard_index import ShardIndex

from tests.conftest import Cli
from tests.support.capabilities import link_optional_package
from tests.support.cluster.training_jobs import Job, losses, png, tiny_run, write_shards
from tests.support.deadline import DEADLINE
from tests.support.image_files import write_pair

pytestmark = pytest.mark.integration

FAMILIES = [
    "tiny-mmdit",
    pytest.param("tiny-sdxl", marks=pytest.mark.slow),
    pytest.param("tiny-sd2", marks=pytest.mark.slow),
    pytest.param("tiny-dit", marks=pytest.mark.slow),
]


def train(
    folder: Path,
    preset: str,
    processes: int = 1,
    packages: Sequence[str] = (),
    **settings: Any,
) -> tuple[Job, list[dict[str, Any]]]:
    defaults = {"max_steps": 3, "checkpoint_every": 3, "per_device_batch_size": 2}
    job = Job(folder, tiny_run(**(defaults | {"preset": preset} | settings)))
    for package in packages:
        link_optional_package(package, job.bundle)
    write_shards(job.train_channel, shards=2, each=8)
    code, events, text = job.run(processes)
    assert code == 0, text
    return job, events


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Job, list[dict[str, Any]]]:
    job, events = train(tmp_path_factory.mktemp("family"), request.param, processes=2)
    return request.param, job, events


def test_diffusers_samples_from_the_final_model_without_sm_train(
    family: tuple[str, Job, list[dict[str, Any]]],
) -> None:
    from diffusers import DiffusionPipeline

    # Flow-trained PixArt has no standard pipeline.
    own = family[0] == "tiny-dit"
    pipeline = DiffusionPipeline.from_pretrained(family[1].base / "model", trust_remote_code=own)
    for guidance in (1.0, 4.0):
        [image] = pipeline("a grey of 3", num_inference_steps=2, guidance_scale=guidance).images
        assert image.size == (8, 8)


@pytest.mark.slow
def test_checkpoint_and_final_model_sample_the_same_images(
    cli: Cli, tmp_path: Path, family: tuple[str, Job, list[dict[str, Any]]]
) -> None:
    (tmp_path / "prompts.txt").write_text("a grey of 1\na grey of 2\n")
    grids = []
    for model in (family[1].base / "model", family[1].checkpoints / "step-00000003"):
        result = cli("sample", model, "--prompts", "prompts.txt", "--steps", "3", "--out", "g.png")
        assert result.returncode == 0, result.stderr
        grids.append((tmp_path / "g.png").read_bytes())
    assert grids[0] == grids[1]


@pytest.mark.slow
def test_precomputed_latents_train_like_images(
    cli: Cli, tmp_path: Path, family: tuple[str, Job, list[dict[str, Any]]]
) -> None:
    """Latents are stored in half precision, with eleven significant bits."""
    preset, first, _ = family
    for number in range(8):
        write_pair(tmp_path / "in", f"{number:02}.png", png(30 * number), f"a grey of {number}")
    components = first.checkpoints / "components"
    losses_of = {}
    for kind, options in (
        ("precomputed latents", ("--latents", components, "--resolution", "8")),
        ("images", ()),
    ):
        packed = tmp_path / kind
        done = cli("pack", "in", packed, *options, timeout=DEADLINE)
        assert done.returncode == 0, done.stderr
        latents = ShardIndex(packed / "index.parquet").header.options.get("latents") or {}
        assert ("pooled" in latents) == (bool(options) and preset in ("tiny-sdxl", "tiny-mmdit"))
        losses_of[kind] = losses(train_packed(packed, components, preset, kind))
    assert losses_of["images"] == pytest.approx(losses_of["precomputed latents"], rel=2e-3)


def train_packed(
    packed: Path, components: Path, preset: str, input_kind: str
) -> list[dict[str, Any]]:
    """Train on packed shards with frozen components; return the events of the job."""
    run = tiny_run(preset=preset, max_steps=3, caption_dropout=0.5, per_device_batch_size=4)
    job = Job(packed / "job", run)
    channels = job.base / "input" / "data"
    shutil.copytree(packed / "shards", channels / "train")
    (channels / "index").mkdir()
    shutil.copy(packed / "index.parquet", channels / "index")
    (channels / "model").symlink_to(components)
    code, events, text = job.run()
    assert code == 0, text
    assert next(event for event in events if event["kind"] == "start")["input_kind"] == input_kind
    return events


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "processes"),
    [("cpu", 1), ("sharded", 2), pytest.param("cpu", 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("preset", FAMILIES)
def test_text_encoders_train_and_sample_alike_wherever_they_are(
    tmp_path: Path, preset: str, placement: str, processes: int
) -> None:
    evaluation = {"every_steps": 2, "prompts": ["a grey of 3"], "num_inference_steps": 2}
    (replicated, before), (moved, after) = (
        train(tmp_path / where, preset, processes, text_encoders=where, evaluation=evaluation)
        for where in ("replicated", placement)
    )
    assert losses(after) == losses(before)
    start = next(event for event in after if event["kind"] == "start")
    assert (start["text_encoders"], start["text_encoders_reason"]) == (
        placement,
        "training.text_encoders",
    )
    images, models = (
        [(job.base / folder).rglob(pattern) for job in (replicated, moved)]
        for folder, pattern in (("checkpoints/samples", "*.png"), ("model", "*.safetensors"))
    )
    for one_run, other in (images, models):
        files = {path.name: path.read_bytes() for path in one_run}
        assert files
        assert files == {path.name: path.read_bytes() for path in other}


@pytest.mark.slow
@pytest.mark.parametrize("preset", FAMILIES)
def test_activation_checkpointing_does_not_change_losses(tmp_path: Path, preset: str) -> None:
    runs = [
        losses(train(tmp_path / str(enabled), preset, activation_checkpointing=enabled)[1])
        for enabled in (False, "selective", True)
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("sharding", "processes"),
    [("full_shard", 2), pytest.param("none", 2, marks=pytest.mark.slow)],
)
def test_fp8_trains_like_bf16(tmp_path: Path, sharding: str, processes: int) -> None:
    """torchao emulates the rounding of fp8 on a CPU."""
    bf16, fp8 = (
        losses(
            train(
                tmp_path / precision,
                "tiny-mmdit",
                processes,
                precision=precision,
                sharding=sharding,
                packages=("torchao",),
            )[1]
        )
        for precision in ("bf16", "fp8")
    )
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "processes"), [("none", 1), ("none", 2), ("full_shard", 2)])
@pytest.mark.parametrize("preset", ["tiny-mmdit", "tiny-sd2"])
def test_compiled_layers_do_not_change_losses(
    tmp_path: Path, preset: str, sharding: str, processes: int
) -> None:
    """Slow: compiling takes three quarters of a minute."""
    plain, compiled = (
        train(tmp_path / str(choice), preset, processes, compile=choice, sharding=sharding)[1]
        for choice in (False, True)
    )
    # Fused kernels round differently.
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)
    first = next(event for event in compiled if event["kind"] == "step")
    assert 1 < first["compile_seconds"] < 1 / first["steps_per_second"]
    assert {event.get("compile_seconds") for event in plain} == {None}

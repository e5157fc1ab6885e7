"""A latent model from training to samples; errors of ``sample`` for folders without a model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Cli
from tests.support.cluster.training_jobs import Job, tiny_run, write_shards

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[dict[str, Any]]]:
    """A tiny latent model with an autoencoder and a frozen text encoder."""
    run = tiny_run(preset="tiny-sd2", max_steps=2, checkpoint_every=1)
    job = Job(tmp_path_factory.mktemp("latent"), run)
    write_shards(job.train_channel, shards=1, each=20)
    code, events, text = job.run()
    assert code == 0, text
    return job, events


def test_random_frozen_components_are_logged(trained: tuple[Job, list[dict[str, Any]]]) -> None:
    messages = [
        event["message"] for event in trained[1] if event.get("code") == "random-init-component"
    ]
    assert [message.split()[0] for message in messages] == ["text_encoder", "vae"]


def test_diffusers_loads_and_runs_the_final_model_without_sm_train(
    trained: tuple[Job, list[dict[str, Any]]],
) -> None:
    from diffusers import AutoencoderKL, DiffusionPipeline, UNet2DConditionModel

    folder = trained[0].base / "model"
    pipeline = DiffusionPipeline.from_pretrained(folder)
    [image] = pipeline("a grey of 3", num_inference_steps=2).images
    assert image.size == (8, 8)
    assert UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    assert AutoencoderKL.from_pretrained(folder, subfolder="vae")


@pytest.mark.slow
def test_sample_writes_the_same_grid_from_model_checkpoint_and_run(
    cli: Cli, tmp_path: Path, trained: tuple[Job, list[dict[str, Any]]]
) -> None:
    (tmp_path / "prompts.txt").write_text("a grey of 1\n\na grey of 2\na grey of 3\n")
    job = trained[0]
    grids = []
    for folder in (job.base / "model", job.checkpoints, job.checkpoints / "step-00000002"):
        result = cli(
            "sample",
            folder,
            "--prompts",
            "prompts.txt",
            "--steps",
            "2",
            "--json",
            "--out",
            f"{folder.name}.png",
        )
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["images"] == 3
        grids.append((tmp_path / f"{folder.name}.png").read_bytes())
    assert grids[0] == grids[1] == grids[2]
    with Image.open(tmp_path / "model.png") as grid:
        assert grid.width > 2 * grid.height  # three images in a row, each with its prompt


@pytest.mark.slow
def test_folder_without_a_model_is_a_one_line_error(
    cli: Cli, tmp_path: Path, trained: tuple[Job, list[dict[str, Any]]]
) -> None:
    (tmp_path / "prompts.txt").write_text("a grey of 1\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    model = trained[0].base / "model"
    shutil.copytree(model, tmp_path / "cut")
    weights = tmp_path / "cut" / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for checkpoint, prompts, out, expected in [
        ("./none", "prompts.txt", "a.png", "./none: no such file or folder"),
        ("nothing", "prompts.txt", "a.png", "holds no model and no checkpoint"),
        ("step-00000001", "prompts.txt", "a.png", "incomplete"),
        ("other", "prompts.txt", "a.png", "other: has no network"),
        ("cut", "prompts.txt", "a.png", "cut: cannot be read"),
        (model, ".", "a.png", "is a folder; give a text file"),
        (model, "prompts.txt", ".", "is a folder; name the PNG in it"),
        (model, "none.txt", "a.png", "none.txt: no such file"),
        (model, "empty.txt", "a.png", "is empty"),
        (model, "latin.txt", "a.png", "not UTF-8"),
        (model, "prompts.txt", "none/a.png", "none: no such folder"),
    ]:
        result = cli("sample", checkpoint, "--prompts", prompts, "--out", out)
        assert result.returncode == 2, result.stderr
        [line] = result.stderr.splitlines()
        assert expected in line
    assert not (tmp_path / "a.png").exists()


@pytest.mark.slow
def test_prompts_are_read_from_a_table(
    cli: Cli, tmp_path: Path, trained: tuple[Job, list[dict[str, Any]]]
) -> None:
    """PartiPrompts' own format: tabs, a header, and quotation marks that belong to the prompt."""
    table = 'Prompt\tCategory\n"a grey" of 1\tArts\na grey of 2\tPeople\n\n'
    (tmp_path / "parti.tsv").write_text(table)
    (tmp_path / "prompts.txt").write_text('"a grey" of 1\na grey of 2\n')
    (tmp_path / "other.tsv").write_text("Text\tCategory\na\tb\n")
    model = trained[0].base / "model"
    grids = []
    for prompts in ("parti.tsv", "prompts.txt"):
        done = cli("sample", model, "--prompts", prompts, "--steps", "2", "--out", "grid.png")
        assert done.returncode == 0, done.stderr
        grids.append((tmp_path / "grid.png").read_bytes())
    assert grids[0] == grids[1]
    other = cli("sample", model, "--prompts", "other.tsv")
    assert other.returncode == 2
    assert "has no column Prompt, its first line has text, category" in other.stderr


def test_image_does_not_depend_on_the_other_prompts_of_its_batch(
    tmp_path: Path, trained: tuple[Job, list[dict[str, Any]]]
) -> None:
    from sm_train.entrypoints.models import image_sampling

    pipeline = image_sampling.load_pipeline(image_sampling.find_source(trained[0].base / "model"))
    prompts = [f"a grey of {number}" for number in range(18)]
    options = image_sampling.SamplingOptions(num_inference_steps=2, guidance_scale=2.0, seed=-3)
    batches = image_sampling.generate(pipeline, prompts, options)
    many = [image for batch in batches for image in batch]
    [[alone]] = image_sampling.generate(pipeline, prompts[:1], options)
    difference = np.abs(np.asarray(alone, np.int16) - np.asarray(many[0], np.int16))
    # Batches of different sizes are summed in different orders.
    assert difference.max() <= 1


@pytest.mark.slow
def test_comparison_page_holds_both_models_images_in_random_order(
    cli: Cli, tmp_path: Path, trained: tuple[Job, list[dict[str, Any]]]
) -> None:
    prompts = [f"a grey of {number} </script>" for number in range(12)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    job = trained[0]
    models = (job.checkpoints / "step-00000001", job.base / "model")
    done = cli("compare", *models, "--prompts", "prompts.txt", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"out": "compare.html", "pairs": 12, "seed": 0}
    page = (tmp_path / "compare.html").read_text()
    # Self-contained: the page fetches nothing.
    assert "http" not in page.replace("http-equiv", "")
    [document] = re.findall(r'<script id="document" type="application/json">(.*?)</script>', page)
    comparison = json.loads(document)
    assert comparison["names"] == [str(model) for model in models]
    assert [pair["prompt"] for pair in comparison["pairs"]] == prompts
    assert {pair["swapped"] for pair in comparison["pairs"]} == {False, True}
    # In reverse order each model keeps its images, under the other name.
    reverse = cli("compare", *reversed(models), "--prompts", "prompts.txt", "--steps", "2")
    assert reverse.returncode == 0
    reversed_page = (tmp_path / "compare.html").read_text()
    [document] = re.findall(
        r'<script id="document" type="application/json">(.*?)</script>', reversed_page
    )
    for pair, other in zip(comparison["pairs"], json.loads(document)["pairs"], strict=True):
        assert {pair["left"], pair["right"]} == {other["left"], other["right"]}
        assert pair["left"] == (
            other["left"] if pair["swapped"] != other["swapped"] else other["right"]
        )
    assert cli("compare", "none", models[1], "--prompts", "prompts.txt").returncode == 2

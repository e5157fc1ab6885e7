"""Custom presets: read, validated in one line, planned and shipped to the job."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sm_train.entrypoints.job_interface.job_config import read_job_config
from sm_train.entrypoints.models.components import PRESETS, read_preset
from sm_train.estimators.bundle.bundle import run_document
from sm_train.estimators.config import preset_file
from sm_train.estimators.config.load import RunFileError, load_document, load_run
from sm_train.estimators.config.preset_file import PresetFileError, read_preset_file
from sm_train.estimators.config.schema import RunConfig

from tests.support.run_documents import run, write_job_file


def shipped(name: str) -> dict[str, Any]:
    preset: dict[str, Any] = json.loads((PRESETS / f"{name}.json").read_text())
    return preset


def load(folder: Path, preset: Any, **model: Any) -> RunConfig:
    """Load a run file with a preset file next to it, from another working directory."""
    text = preset if isinstance(preset, str) else json.dumps(preset)
    (folder / "mine.json").write_text(text)
    document = run(model={"preset": "./mine.json"} | model)
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    return load_run(folder / "run.yaml")


def test_file_is_read_next_to_the_run_file_and_reaches_the_job(tmp_path: Path) -> None:
    preset = shipped("tiny-mmdit")
    preset["network"]["num_layers"] = 3
    config = load(tmp_path, preset)
    model = read_job_config(write_job_file(tmp_path, config), "256px").model
    assert model.preset == "./mine.json"
    in_job = read_preset(model.preset, model.preset_content)
    assert in_job["network"]["num_layers"] == 3
    assert in_job["vae"]["latent_channels"] == 4
    # A clone has the bundle's run file only.
    assert load_document(run_document(config), ("stages.0.max_steps=5",), "job") is not None


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.json")))
def test_every_shipped_preset_is_a_valid_file(name: str) -> None:
    assert read_preset_file(PRESETS / f"{name}.json")


def changed(name: str, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    preset = shipped(name)
    parent: Any = preset
    for key in path[:-1]:
        parent = parent[key]
    if value is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return preset


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "must be an object"),
        (changed("sd2", ("vae",), "vae-sd9"), "vae: 'vae-sd9' is not one of vae-sd, vae-sd3"),
        (changed("sd2", ("network",), None), "network: is missing"),
        (changed("sd2", ("network", "class"), "UNet3D"), "network.class: 'UNet3D' is not one of"),
        (changed("sd2", ("network", "layers"), 2), "network.layers: unknown key (known: sample_"),
        (
            changed("sd2", ("network", "sample_size"), "64"),
            "network.sample_size: '64' ",
        ),
        (changed("sd2", ("network", "in_channels"), -4), "network.in_channels: -4 must be a whole"),
        (changed("mmdit-2b", ("prediction_type",), "epsilon"), "prediction_type: 'epsilon' is not"),
        (changed("mmdit-2b", ("diffusion",), {}), "diffusion: does not apply to SD3Transformer2D"),
        (changed("dit-xl", ("diffusion", "beta_end"), "x"), "diffusion.beta_end: 'x' must be"),
        (changed("sd2", ("diffusion",), None), "diffusion: is missing"),
        (changed("sd2", ("diffusion", "beta_start"), "low"), "diffusion.beta_start: 'low' must be"),
        (changed("sd2", ("text_encoders",), []), "text_encoders: must be a list of 1 to 3"),
        (changed("sd2", ("text_encoders", 0), "clip-z"), "text_encoders[0]: 'clip-z' is not one"),
        (changed("sdxl", ("train_text_encoder",), True), "train_text_encoder: only a single"),
        (changed("sd2", ("text_encoders",), ["t5-xxl"]), "network.cross_attention_dim: 1024 must"),
        (
            changed("sdxl", ("network", "addition_time_embed_dim"), 128),
            "network.projection_class_embeddings_input_dim: 2816 must be 2048",
        ),
        (changed("mmdit-2b", ("network", "pooled_projection_dim"), 7), "network.pooled_proj"),
        (changed("sd2", ("lora",), 1), "lora: unknown key"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(
    tmp_path: Path, preset: Any, message: str
) -> None:
    with pytest.raises(RunFileError) as error:
        load(tmp_path, preset)
    [line] = str(error.value).splitlines()
    assert "run.yaml:" in line
    assert f"model.preset: './mine.json': {message}" in line


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run(model={"preset": "none.json"})))
    with pytest.raises(RunFileError, match=r"model.preset: 'none.json': no such file; it is"):
        load_run(tmp_path / "run.yaml")


def test_prediction_type_is_that_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="supports flow, not epsilon"):
        load(tmp_path, shipped("tiny-mmdit"), prediction_type="epsilon")
    load(tmp_path, shipped("tiny-dit"), prediction_type="epsilon")


def test_known_arguments_are_those_of_the_libraries() -> None:
    import diffusers
    import transformers

    classes: dict[str, Any] = {
        name: getattr(diffusers, name) for name in (*preset_file.NETWORKS, "AutoencoderKL")
    }
    classes |= {
        name: getattr(transformers, name).config_class for name in preset_file.TEXT_ENCODERS
    }
    for name, model_class in classes.items():
        known = preset_file._known_arguments()[name]
        assert known.keys() <= inspect.signature(model_class.__init__).parameters.keys(), name


def test_damaged_content_is_refused() -> None:
    with pytest.raises(PresetFileError, match="line 1: not JSON"):
        preset_file.canonical("{")

"""Checkpoints become diffusers folders, single files and Distributed Checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.checkpoint_export import ExportOptions, export, export_bytes
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.models.image_sampling import find_source, load_pipeline
from sm_train.entrypoints.models.model_folders import load_model
from sm_train.entrypoints.models.single_file import unet_name, vae_name
from sm_train.entrypoints.models.trained_network import Network
from sm_train.entrypoints.models.weight_files import read_layout, write_tensors

from tests.support.models import RAW_OFFSET, build, write_checkpoint


def run(checkpoint: Path, tmp_path: Path, **options: Any) -> Path:
    """Export to ``tmp_path / "out"``; check that progress covers what was announced."""
    out, written = tmp_path / "out", 0

    def progress(size: int) -> None:
        nonlocal written
        written += size

    source = find_source(checkpoint)
    chosen = ExportOptions(**({"format": "diffusers"} | options))
    (tmp_path / "scratch").mkdir(exist_ok=True)
    export(source, chosen, out, tmp_path / "scratch", progress)
    assert written == export_bytes(source, chosen) or chosen.format == "single-file"
    return out


def draw(pipeline: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    options = {"num_inference_steps": 2, "guidance_scale": 4.0, "output_type": "np"}
    return np.asarray(pipeline(["a grey of 3"], generator=generator, **options).images)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "raw"])
def test_a_diffusers_folder_has_the_chosen_weights(tmp_path: Path, weights: str | None) -> None:
    parts = build("tiny-sd2")
    checkpoint = write_checkpoint(parts, tmp_path)
    out = run(checkpoint, tmp_path, weights=weights)
    saved = load_file(out / "unet/diffusion_pytorch_model.safetensors")
    offset = RAW_OFFSET if weights == "raw" else 0.0
    for name, tensor in parts.network.named_parameters():
        torch.testing.assert_close(saved[name], tensor + offset, rtol=0, atol=0)
    card = (out / "README.md").read_text()
    assert ("raw (not averaged)" if weights == "raw" else "(EMA)") in card
    if weights is None:
        expected = draw(load_pipeline(find_source(checkpoint)))
        np.testing.assert_array_equal(draw(load_model(out)), expected)


@pytest.mark.integration
def test_bf16_converts_all_weights_and_opens_without_further_options(tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    checkpoint = write_checkpoint(build("tiny-sd2"), tmp_path)
    out = run(checkpoint, tmp_path, dtype=torch.bfloat16)
    dtypes = {
        spec.dtype for path in out.rglob("*.safetensors") for spec in read_layout(path).values()
    }
    assert dtypes == {torch.bfloat16}
    assert draw(DiffusionPipeline.from_pretrained(out)).shape == (1, 64, 64, 3)


def test_weights_that_the_checkpoint_lacks_are_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(build("tiny-sd2"), tmp_path, ema=False)
    with pytest.raises(CheckpointError, match="has no EMA weights"):
        run(checkpoint, tmp_path, weights="ema")


def sdxl_with_encoders_of_two_widths() -> ModelComponents:
    """As in SDXL, where from_single_file distinguishes the encoders by their width."""
    preset = read_preset("tiny-sdxl")
    preset["text_encoders"][1]["hidden_size"] = 64
    preset["network"]["cross_attention_dim"] = 96
    return build("./wide.json", preset_content=json.dumps(preset))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("preset", "name"),
    [("tiny-sd2", "StableDiffusionPipeline"), ("tiny-sdxl", "StableDiffusionXLPipeline")],
)
def test_a_single_file_makes_the_round_trip_through_diffusers(
    tmp_path: Path, preset: str, name: str
) -> None:
    import diffusers

    torch.manual_seed(0)
    is_xl = preset == "tiny-sdxl"
    parts = sdxl_with_encoders_of_two_widths() if is_xl else build(preset)
    checkpoint = write_checkpoint(parts, tmp_path)
    file = run(checkpoint, tmp_path, format="single-file").rename(tmp_path / "model.safetensors")
    folder = run(checkpoint, tmp_path / "scratch")
    expected = getattr(diffusers, name).from_pretrained(folder)
    loaded = getattr(diffusers, name).from_single_file(
        str(file), config=str(folder), local_files_only=True
    )
    for component in ("unet", "vae", "text_encoder", *(["text_encoder_2"] if is_xl else [])):
        saved = getattr(expected, component).state_dict()
        read = getattr(loaded, component).state_dict()
        assert read.keys() == saved.keys()
        for key, tensor in saved.items():
            torch.testing.assert_close(read[key], tensor, rtol=0, atol=0, msg=key)
    np.testing.assert_allclose(draw(loaded), draw(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", ["sd2", "sdxl"])
def test_the_full_sizes_have_the_names_that_diffusers_reads(preset: str) -> None:
    from diffusers import AutoencoderKL
    from diffusers.loaders import single_file_utils

    config = read_preset(preset)
    network = Network(config["network"], None, config["network"]["sample_size"])
    attends = ["CrossAttn" in kind for kind in config["network"]["up_block_types"]]
    names = {
        f"model.diffusion_model.{unet_name(name, 2, attends)}": name
        for name in network.module.state_dict()
    }
    read = single_file_utils.convert_ldm_unet_checkpoint(names, network.module.config)
    assert read == {name: name for name in network.module.state_dict()}
    with torch.device("meta"):
        vae = AutoencoderKL.from_config(
            {key: value for key, value in config["vae"].items() if key != "class"}
        )
    # The loader reshapes the attention's weights, so they are tensors here.
    tensors = {f"first_stage_model.{vae_name(name, 4)}": t for name, t in vae.state_dict().items()}
    assert (
        single_file_utils.convert_ldm_vae_checkpoint(tensors, vae.config).keys()
        == vae.state_dict().keys()
    )


def test_other_models_have_no_single_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(build("tiny-mmdit"), tmp_path)
    with pytest.raises(CheckpointError, match="only sd2 and sdxl have; use --format diffusers"):
        run(checkpoint, tmp_path, format="single-file")
    assert not (tmp_path / "out").exists()


def test_pytorch_reads_the_distributed_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    parts = build("tiny-mmdit")
    out = run(write_checkpoint(parts, tmp_path), tmp_path, format="dcp")
    expected = {f"transformer.{name}": t for name, t in parts.network.state_dict().items()}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(loaded, checkpoint_id=out)
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)


def test_a_components_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(build("tiny-sd2"), tmp_path)
    path = tmp_path / "components" / "components.json"
    document = json.loads(path.read_text())
    del document["record"]
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="earlier version; resume the run once"):
        run(checkpoint, tmp_path)


def test_files_written_tensor_by_tensor_are_those_of_the_library(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(3, 5).bfloat16(),
        "ids": torch.arange(7),
    }
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    layout = read_layout(tmp_path / "library.safetensors")
    write_tensors(tmp_path / "own.safetensors", layout, ((name, tensors[name]) for name in layout))
    assert read_layout(tmp_path / "own.safetensors") == layout
    for name, tensor in load_file(tmp_path / "own.safetensors").items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0)

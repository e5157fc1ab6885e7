"""Frozen components are written once for each run, in the precision of their source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sm_train.entrypoints.job_interface.job_config import ModelConfig
from sm_train.entrypoints.models.builder import ModelComponents, build_components
from sm_train.entrypoints.models.model_folders import save_components, save_model, share_model

from tests.support.models import record, trained_weights

MODEL = ModelConfig("tiny-sdxl", None, False, None, None)
WEIGHTS = ("vae", "text_encoder", "text_encoder_2")


def build(source: Path | None) -> ModelComponents:
    torch.manual_seed(0)
    return build_components(MODEL, 64, components=source, previous=None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Components as published: text encoders in half precision, an autoencoder in bf16."""
    folder = tmp_path_factory.mktemp("source")
    random = build(None)
    assert save_components(random, None, record(), folder)
    for name, component in random.named_components().items():
        if name in WEIGHTS:
            dtype = torch.bfloat16 if name == "vae" else torch.float16
            component.to(dtype).save_pretrained(folder / name)
    (folder / "components.json").unlink()
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.relative_to(folder)}:{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_weights_are_those_of_the_source_in_its_precision(tmp_path: Path, source: Path) -> None:
    components = build(source)
    assert save_components(components, source, record(), tmp_path)
    saved, stored = weights(tmp_path), weights(source)
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert (
            saved[name].dtype
            == tensor.dtype
            == (torch.bfloat16 if name.startswith("vae") else torch.float16)
        )
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=0)
    # Training continues in fp32.
    assert {
        parameter.dtype
        for module in components.frozen_modules()
        for parameter in module.parameters()
    } == {torch.float32}


def inodes(folder: Path) -> dict[str, int]:
    """Return the inode of each file, which changes when it is written anew."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_ino for path in files}


def test_a_restart_writes_no_component_again(tmp_path: Path, source: Path) -> None:
    assert save_components(build(source), source, record(), tmp_path)
    before = inodes(tmp_path)
    assert not save_components(build(source), source, record(), tmp_path)
    after = inodes(tmp_path)
    # The manifest has the network's configuration, which a later version may change.
    assert before.pop("components.json")
    assert after.pop("components.json")
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "cut", "other source"])
def test_an_incomplete_or_different_folder_is_written_again(
    tmp_path: Path, source: Path, damage: str
) -> None:
    """The upload of a stopped job may be incomplete."""
    other = shutil.copytree(source, tmp_path / "source")
    folder = tmp_path / "components"
    assert save_components(build(other), other, record(), folder)
    file = folder / "text_encoder_2" / "model.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        (other / "vae" / "config.json").write_bytes(
            (other / "vae" / "config.json").read_bytes() + b"\n"
        )
    assert save_components(build(other), other, record(), folder)
    assert weights(folder).keys() == weights(source).keys()


def test_random_components_are_written_at_every_start(tmp_path: Path) -> None:
    """Another version of a library may initialize them differently."""
    assert save_components(build(None), None, record(), tmp_path)
    assert save_components(build(None), None, record(), tmp_path)


def test_the_final_model_shares_its_frozen_files(tmp_path: Path, source: Path) -> None:
    """Hard links take no space; the trained weights are copied."""
    from diffusers import DiffusionPipeline

    parts = build(source)
    parts.network_init.materialize(torch.device("cpu"), 0)
    folder, model, final = (tmp_path / name for name in ("components", "model", "final"))
    save_components(parts, source, record(), folder)
    save_model(folder, trained_weights(parts), model)
    # Repeated, as by a job that is restarted after its last step.
    for _ in range(2):
        share_model(folder, model, final)
        assert inodes(final).keys() == inodes(model).keys()
        of_components = inodes(folder)
        shared = {name for name, inode in inodes(final).items() if inode == of_components.get(name)}
        assert {f"{name}/model.safetensors" for name in WEIGHTS[1:]} <= shared
        assert "unet/diffusion_pytorch_model.safetensors" not in shared
    assert weights(final).keys() == weights(model).keys()
    # Half-precision text encoders and autoencoder, and an fp32 network.
    pipeline = DiffusionPipeline.from_pretrained(final)
    [image] = pipeline("a grey of 3", num_inference_steps=1, guidance_scale=4.0).images
    assert image.size == (64, 64)

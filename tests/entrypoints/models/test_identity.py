"""A component's identity is what its tensors hold, however they are saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sm_train.entrypoints.models.component_files import (
    LocalComponents,
    frozen_identities,
    identity_differences,
    tensors_identity,
)

from tests.support.models import build, save

SHARD = "20KB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The components of a tiny Stable Diffusion XL, as a job writes them."""
    base = tmp_path_factory.mktemp("source")
    save(build("tiny-sdxl"), base)
    return base / "components"


def weights(folder: Path, component: str) -> Path:
    [path] = (folder / component).glob("*.safetensors")
    return path


def changed(folder: Path, tmp_path: Path, component: str, change: Any) -> str:
    """Return the identity of a component after a change of its tensors."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = weights(copy, component)
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return tensors_identity(LocalComponents(copy), component)


def test_saving_again_in_other_files_does_not_change_it(folder: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel

    for component, kind in (("vae", AutoencoderKL), ("text_encoder", CLIPTextModel)):
        expected = tensors_identity(LocalComponents(folder), component)
        model = kind.from_pretrained(folder / component)
        model.save_pretrained(tmp_path / "whole" / component)
        model.save_pretrained(tmp_path / "sharded" / component, max_shard_size=SHARD)
        assert len([*(tmp_path / "sharded" / component).glob("*.safetensors")]) > 1
        for saved in ("whole", "sharded"):
            assert tensors_identity(LocalComponents(tmp_path / saved), component) == expected


def test_names_that_libraries_change_do_not_change_it(folder: Path, tmp_path: Path) -> None:
    """Transformers 4 and 5, and diffusers before 0.18, name the same tensors in other ways."""
    for component, old in (
        ("text_encoder", lambda name: f"text_model.{name}"),
        (
            "vae",
            lambda name: (
                name.replace(".to_q.", ".query.")
                .replace(".to_k.", ".key.")
                .replace(".to_v.", ".value.")
                .replace(".to_out.0.", ".proj_attn.")
            ),
        ),
    ):
        expected = tensors_identity(LocalComponents(folder), component)
        names = [*load_file(weights(folder, component))]
        assert [*map(old, names)] != names

        def rename(tensors: dict[str, Any], old: Any = old) -> dict[str, Any]:
            renamed = {
                old(name.removeprefix("text_model.")): value for name, value in tensors.items()
            }
            return renamed | {"text_model.embeddings.position_ids": torch.arange(4)[None]}

        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        assert changed(folder, tmp_path, component, rename) == expected


@pytest.mark.parametrize("component", ["vae", "text_encoder", "text_encoder_2"])
def test_other_weights_of_equal_shapes_change_it(
    folder: Path, tmp_path: Path, component: str
) -> None:
    """The name and the size of each file are those of the original."""
    before = frozen_identities(LocalComponents(folder))

    def train(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: value + 0.01 * torch.randn_like(value) for name, value in tensors.items()}

    after = {**before, component: changed(folder, tmp_path, component, train)}
    assert weights(folder, component).stat().st_size == (
        weights(tmp_path / "copy", component).stat().st_size
    )
    assert identity_differences(before, after) == [
        f"{component} {before[component]} (sampled) → {after[component]} (sampled)"
    ]


def test_one_changed_value_in_a_small_tensor_and_swapped_tensors_change_it(
    folder: Path, tmp_path: Path
) -> None:
    expected = tensors_identity(LocalComponents(folder), "vae")

    def one_value(tensors: dict[str, Any]) -> dict[str, Any]:
        name = next(name for name in tensors if name.endswith("conv_in.weight"))
        tensors[name].view(-1)[-1] += 1e-3
        return tensors

    def swap(tensors: dict[str, Any]) -> dict[str, Any]:
        first, second = (
            f"decoder.mid_block.attentions.0.{name}.weight" for name in ("to_q", "to_k")
        )
        return tensors | {first: tensors[second].clone(), second: tensors[first].clone()}

    identities = {expected}
    for change in (one_value, swap):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        identities.add(changed(folder, tmp_path, "vae", change))
    assert len(identities) == 3


def test_type_and_any_part_of_a_large_tensor_change_it(tmp_path: Path) -> None:
    """Its sixteenth parts are sampled, also the last bytes."""
    component = tmp_path / "vae"
    component.mkdir()
    path = component / "model.safetensors"
    large = torch.randn(2**20, generator=torch.Generator().manual_seed(0))

    def identity(tensor: Any) -> str:
        save_file({"large": tensor}, path)
        return tensors_identity(LocalComponents(tmp_path), "vae")

    seen = {identity(large), identity(large.half()), identity(large.view(1024, 1024))}
    other = torch.randn(2**20, generator=torch.Generator().manual_seed(1))
    for part in range(16):
        span = slice(part * 2**16, (part + 1) * 2**16)
        changed_part = large.clone()
        changed_part[span] = other[span]
        seen.add(identity(changed_part))
    assert len(seen) == 19
    assert identity(large) in seen


def test_only_components_that_a_job_loads_have_an_identity(folder: Path, tmp_path: Path) -> None:
    """The folders of some published models hold text encoders for other programs, too."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "text_encoders").mkdir()
    (copy / "text_encoders" / "clip_l.safetensors").write_bytes(b"")
    (copy / "text_encoder_notes.txt").write_text("notes")
    expected = frozen_identities(LocalComponents(folder))
    assert expected.keys() == {"text_encoder", "text_encoder_2", "vae"}
    assert frozen_identities(LocalComponents(copy)) == expected

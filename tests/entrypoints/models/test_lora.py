"""A LoRA adapter opens in diffusers, can be merged, and is refused where it cannot be trained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import (
    CheckpointError,
)
from sm_train.entrypoints.job_interface.job_config import JobConfigError, LoraConfig
from sm_train.entrypoints.models import checkpoint_export
from sm_train.entrypoints.models.builder import build_components
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.models.image_sampling import find_source, load_pipeline
from sm_train.entrypoints.models.lora import load_adapter
from sm_train.entrypoints.models.trained_network import Network
from sm_train.entrypoints.models.weight_files import read_layout
from sm_train.entrypoints.planning.measure import measure_pass
from sm_train.entrypoints.planning.memory import plan_path, plan_preset

from tests.entrypoints.models.lora_support import LORA, run_folder, train
from tests.support.capabilities import link_optional_package
from tests.support.models import build, open_adapters, save

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of PEFT, importable in this process."""
    folder = tmp_path_factory.mktemp("packages")
    link_optional_package("peft", folder)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def export(folder: Path, out: Path, **options: Any) -> Path:
    scratch = out.with_suffix(".scratch")
    scratch.mkdir()
    chosen = checkpoint_export.ExportOptions(options.pop("format", "diffusers"), **options)
    checkpoint_export.export(find_source(folder), chosen, out, scratch, lambda _: None)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("tiny-sd2", "tiny-dit"),
        pytest.param(("tiny-sdxl", "tiny-mmdit", "tiny-dit epsilon"), marks=pytest.mark.slow),
    ],
)
def test_diffusers_draws_the_images_of_our_sampler(
    tmp_path: Path, packages: Path, names: tuple[str, ...]
) -> None:
    expected, folders = {}, []
    for name in names:
        preset, _, prediction_type = name.partition(" ")
        options = {"prediction_type": prediction_type or None}
        folder = tmp_path / name.replace(" ", "-")
        base = save(build(preset, **options), folder)
        run = run_folder(train(preset, base, **options), base, folder / "run")
        plain = open_adapters.draw(load_pipeline(find_source(base)))
        expected[folder] = open_adapters.draw(load_pipeline(find_source(run)))
        final = open_adapters.draw(load_pipeline(find_source(run / "final")))
        np.testing.assert_allclose(final, expected[folder], rtol=0, atol=1e-6)
        assert np.abs(expected[folder] - plain).max() > 1e-3
        folders.append(folder)
    command = [sys.executable, open_adapters.__file__, str(packages), *map(str, folders)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    for folder in folders:
        image = np.load(folder / "image.npy")
        np.testing.assert_allclose(image, expected[folder], rtol=0, atol=1e-5, err_msg=folder.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "presets",
    [
        ("tiny-mmdit", "tiny-dit"),
        pytest.param(("tiny-sd2", "tiny-sdxl"), marks=pytest.mark.slow),
    ],
)
def test_adapter_of_another_size_than_its_base_is_drawn_alike(
    tmp_path: Path, packages: Path, presets: tuple[str, ...]
) -> None:
    """A base of 64 px: diffusers derives the positions of each image size from it alone."""
    expected = {}
    for preset in presets:
        for size in (32, 48):
            folder = tmp_path / f"{preset}-{size}"
            base = save(build(preset), folder)
            run = run_folder(train(preset, base, resolution=size), base, folder / "run")
            expected[folder, size] = open_adapters.draw(load_pipeline(find_source(run)))
            assert expected[folder, size].shape == (1, size, size, 3)
            final = open_adapters.draw(load_pipeline(find_source(run / "final")))
            np.testing.assert_allclose(final, expected[folder, size], rtol=0, atol=1e-6)
    arguments = [f"{folder}@{size}" for folder, size in expected]
    command = [sys.executable, open_adapters.__file__, str(packages), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    for (folder, _), image in expected.items():
        read = np.load(folder / "image.npy")
        np.testing.assert_allclose(read, image, rtol=0, atol=1e-5, err_msg=folder.name)


@pytest.mark.usefixtures("packages")
def test_merged_adapter_of_another_size_is_drawn_alike(tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    base = save(build("tiny-mmdit"), tmp_path / "base")
    run = run_folder(train("tiny-mmdit", base, resolution=48), base, tmp_path / "run")
    expected = open_adapters.draw(load_pipeline(find_source(run)))
    merged = export(run, tmp_path / "merged", merge=True)
    image = open_adapters.draw(DiffusionPipeline.from_pretrained(merged))
    np.testing.assert_allclose(image, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("packages")
def test_export_writes_the_adapter_or_the_merged_model(tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    base = save(build("tiny-sd2"), tmp_path / "base")
    run = run_folder(train("tiny-sd2", base), base, tmp_path / "run")
    expected = open_adapters.draw(load_pipeline(find_source(run)))
    adapter = export(run, tmp_path / "adapter", dtype=torch.bfloat16)
    assert {path.name for path in adapter.iterdir()} == {
        "README.md",
        "pytorch_lora_weights.safetensors",
    }
    layout = read_layout(adapter / "pytorch_lora_weights.safetensors")
    assert {spec.dtype for spec in layout.values()} == {torch.bfloat16}
    merged = export(run, tmp_path / "merged", merge=True)
    image = open_adapters.draw(StableDiffusionPipeline.from_pretrained(merged))
    np.testing.assert_allclose(image, expected, rtol=0, atol=1e-5)
    single = export(run, tmp_path / "one", merge=True, format="single-file")
    assert single.stat().st_size > 1e5
    for options, message in (
        ({"format": "dcp"}, "holds an adapter; add --merge"),
        ({"weights": "ema"}, "has no EMA weights"),
    ):
        with pytest.raises(CheckpointError, match=message):
            export(run, tmp_path / f"refused-{len(message)}", **options)
    with pytest.raises(CheckpointError, match="holds no adapter; remove --merge"):
        export(base, tmp_path / "refused", merge=True)
    alone = tmp_path / "alone"
    (run / "final").rename(alone)
    with pytest.raises(CheckpointError, match="adapter without the model that it extends"):
        find_source(alone)


@pytest.mark.usefixtures("packages")
def test_a_stage_continues_the_previous_adapter(tmp_path: Path) -> None:
    base = save(build("tiny-mmdit"), tmp_path / "base")
    trained = train("tiny-mmdit", base)
    run = run_folder(trained, base, tmp_path / "run")
    options: dict[str, Any] = {"components": base, "previous": run / "final"}
    model = build_model_config("tiny-mmdit", LORA)
    later = build_components(model, 128, **options)
    later.network_init.materialize(torch.device("cpu"), 0)
    found = dict(later.network.named_parameters())
    for name, parameter in trained.network.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-6, atol=1e-7)
    other = build_model_config("tiny-mmdit", LoraConfig(2, 6.0, None, 0.0))
    wrong = build_components(other, 128, **options)
    with pytest.raises(JobConfigError, match="an adapter of another rank or of other layers"):
        wrong.network_init.materialize(torch.device("cpu"), 0)


def build_model_config(preset: str, lora: LoraConfig) -> Any:
    from sm_train.entrypoints.job_interface.job_config import ModelConfig

    return ModelConfig(preset, None, None, None, None, lora=lora)


@pytest.mark.usefixtures("packages")
def test_an_adapter_starts_as_the_pretrained_network(tmp_path: Path) -> None:
    plain = build("tiny-dit").network_init
    config = dict(plain.preset_config)
    extended = Network(config, None, plain.side, lora=LORA)
    extended.materialize(torch.device("cpu"), 0)
    alone = Network(config, None, plain.side)
    alone.materialize(torch.device("cpu"), 0)
    state = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in extended.module.state_dict().items()
    }
    for name, tensor in alone.module.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
    lora_b = [tensor for name, tensor in state.items() if ".lora_B." in name]
    assert lora_b
    assert not any(tensor.any() for tensor in lora_b)
    assert extended.base_digest(0) == "random-0-6"


@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    "preset",
    ["tiny-sd2", "tiny-dit", "tiny-mmdit", pytest.param("tiny-sdxl", marks=pytest.mark.slow)],
)
def test_planned_activations_are_an_upper_bound(preset: str) -> None:
    """With dropout or many targets PEFT keeps more than a training of all weights."""
    everything = tuple(json.loads(plan_path(preset).read_text())["lora_layers"])
    for targets, dropout in ((None, 0.0), (None, 0.1), (everything, 0.0), (everything, 0.1)):
        lora = LoraConfig(rank=8, alpha=8.0, targets=targets, dropout=dropout)
        measured = measure_pass(read_preset(preset), 64, "bf16", lora)
        planned = plan_preset(preset, 64, precision="bf16", lora=lora)
        assert 1.0 <= planned.kept_bytes / measured.kept_bytes < 1.5
        checkpointed = measured.checkpointed_bytes + max(measured.block_bytes)
        assert planned.checkpointed_bytes >= checkpointed


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("preset", "lora", "message"),
    [
        ("tiny-dit", LoraConfig(4, 4.0, ("to_x",), 0.0), "'to_x' is no layer of PixArt"),
        ("digits", LORA, "trains its text encoder from random weights"),
    ],
)
def test_what_cannot_be_extended_is_refused(preset: str, lora: LoraConfig, message: str) -> None:
    with pytest.raises(JobConfigError, match=message):
        build_components(build_model_config(preset, lora), 64, components=None, previous=None)


@pytest.mark.usefixtures("packages")
def test_an_adapter_of_nothing_is_named(tmp_path: Path) -> None:
    network = Network(build("tiny-dit").network_init.preset_config, None, 8, lora=LORA)
    with pytest.raises(JobConfigError, match="holds no pytorch_lora_weights"):
        load_adapter(network.module, LORA, tmp_path)

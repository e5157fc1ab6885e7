"""A job starts from a pretrained folder, is killed, exported, resumed, and ends in a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from sm_train.entrypoints.models.component_files import (
    MANIFEST_FILE,
    FileDigest,
    ModelManifest,
    file_sha256,
)

from tests.conftest import Cli
from tests.support.cluster.training_jobs import Job, losses, tiny_run, write_shards
from tests.support.models import build


def start_from_pretrained(folder: Path) -> Job:
    """A PixArt that predicts the noise, as published; the preset's default is a flow."""
    evaluation = {"every_steps": 4, "prompts": ["a grey of 3"], "num_inference_steps": 1}
    run = tiny_run(
        preset="tiny-dit",
        model={"license": "openrail++"},
        max_steps=6,
        checkpoint_every=2,
        evaluation=evaluation,
    )
    job = Job(folder, run)
    write_shards(job.train_channel, shards=2, each=20)
    source = folder / "input" / "data" / "model"
    for name, component in build("tiny-dit", prediction_type="epsilon").named_components().items():
        component.save_pretrained(source / name)
    files = {
        path.relative_to(source).as_posix(): FileDigest(path.stat().st_size, file_sha256(path))
        for path in source.rglob("*")
        if path.is_file()
    }
    (source / MANIFEST_FILE).write_text(ModelManifest("org/pixart", "0" * 40, files).to_json())
    return job


@pytest.mark.slow
@pytest.mark.integration
def test_changed_components_end_the_job(tmp_path: Path) -> None:
    job = start_from_pretrained(tmp_path)
    weights = tmp_path / "input" / "data" / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, _ = job.run()
    assert code == 1
    assert "model.components: vae/diffusion_pytorch_model.safetensors: the digest" in job.failure


@pytest.mark.slow
def test_killed_exported_and_resumed(cli: Cli, tmp_path: Path) -> None:
    from diffusers import PixArtSigmaPipeline

    whole = start_from_pretrained(tmp_path / "whole")
    code, events, text = whole.run()
    assert code == 0, text
    killed = start_from_pretrained(tmp_path / "killed")
    with killed.start() as running:
        running.wait_for("checkpoint", step=4)
        running.process.kill()
    result = cli("export", killed.checkpoints, tmp_path / "exported")
    assert result.returncode == 0, result.stderr
    assert "`epsilon`" in (tmp_path / "exported" / "README.md").read_text()
    code, resumed, text = killed.run()
    assert code == 0, text
    expected = losses(events)
    assert {step: expected[step] for step in losses(resumed)} == losses(resumed)
    name = "transformer/diffusion_pytorch_model.safetensors"
    models = [load_file(job.base / "model" / name) for job in (whole, killed)]
    assert all((models[0][key] == models[1][key]).all() for key in models[0])
    folder = killed.base / "model"
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "PixArtSigmaPipeline"
    assert PixArtSigmaPipeline.from_pretrained(folder)
    assert 'license: "openrail++"' in (folder / "README.md").read_text()
    assert (folder / "samples.png").read_bytes().startswith(b"\x89PNG")
    # The same weights by the checkpoint of the last step.
    result = cli("export", killed.checkpoints / "step-00000006", tmp_path / "last")
    assert result.returncode == 0, result.stderr
    last = load_file(tmp_path / "last" / name)
    assert all((last[key] == models[1][key]).all() for key in last)

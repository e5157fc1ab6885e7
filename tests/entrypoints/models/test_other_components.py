"""A run continues with the components that its weights were trained with, or says what changed."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sm_train.entrypoints.models.component_files import LocalComponents, frozen_identities

from tests.support.cluster.training_jobs import Job, tiny_run, write_shards

pytestmark = pytest.mark.integration

FROZEN = ("text_encoder", "vae")


def job(base: Path, components: Path, steps: int, **model: Any) -> Job:
    """Return a job that trains on ``components`` until ``steps``."""
    run = tiny_run(
        max_steps=steps, checkpoint_every=2, preset="tiny-sd2", resolution=16, learning_rate=1e-3
    )
    changed = run.model.model_copy(update=model)
    job = Job(base, run.model_copy(update={"model": changed}))
    write_shards(job.train_channel, shards=1, each=8)
    (base / "input/data/model").symlink_to(components)
    return job


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Components, and others of the same shapes and file sizes."""
    base = tmp_path_factory.mktemp("components")
    first = Job(base / "first", tiny_run(max_steps=1, checkpoint_every=1, preset="tiny-sd2"))
    write_shards(first.train_channel, shards=1, each=8)
    code, _, text = first.run()
    assert code == 0, text
    generator = torch.Generator().manual_seed(5)
    for name in ("A", "B"):
        for component in (*FROZEN, "tokenizer"):
            shutil.copytree(first.checkpoints / "components" / component, base / name / component)
    for component in FROZEN:
        [path] = (base / "B" / component).glob("*.safetensors")
        trained = {
            key: value + 0.3 * torch.randn(value.shape, generator=generator)
            for key, value in load_file(path).items()
        }
        save_file(trained, path, metadata={"format": "pt"})
    return base / "A", base / "B"


def digests(folder: Path) -> dict[str, str]:
    return {
        component: hashlib.sha256(
            next((folder / component).glob("*.safetensors")).read_bytes()
        ).hexdigest()
        for component in FROZEN
    }


@pytest.mark.slow
def test_other_components_are_refused_unless_they_are_accepted(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    """The published model holds the components that it was trained with last."""
    first, second = folders
    run = job(tmp_path / "run", first, 2)
    code, _, text = run.run()
    assert code == 0, text

    def resume(
        name: str, components: Path, **model: Any
    ) -> tuple[int, list[dict[str, Any]], str, Job]:
        resumed = job(tmp_path / name, components, 4, **model)
        shutil.copytree(run.checkpoints, resumed.checkpoints, dirs_exist_ok=True)
        return (*resumed.run(), resumed)

    code, _, text, _ = resume("refused", second)
    assert code != 0
    old, new = (frozen_identities(LocalComponents(folder)) for folder in folders)
    for component in FROZEN:
        assert f"{component} {old[component]} (sampled) → {new[component]} (sampled)" in text
    assert "give --accept-components to continue" in text

    code, events, text, accepted = resume("accepted", second, accept_components=True)
    assert code == 0, text
    [event] = [event for event in events if event.get("code") == "components-changed"]
    assert new["vae"] in event["message"]
    assert digests(accepted.base / "model") == digests(second)
    card = (accepted.base / "model" / "README.md").read_text()
    assert f"| tensors of `vae` | `{new['vae']} (sampled)` |" in card

    code, events, text, same = resume("same", first)
    assert code == 0, text
    assert not [event for event in events if event.get("code") == "components-changed"]
    assert digests(same.base / "model") == digests(first)

    # The next stage starts from this one's final model.
    stage = job(tmp_path / "stage", second, 2)
    shutil.copytree(same.checkpoints / "final", stage.base / "input/data/previous")
    code, _, text = stage.run()
    assert code != 0
    assert f"vae {old['vae']} (sampled) → {new['vae']} (sampled)" in text
    # Saved again with the final model, they are the same components.
    final = same.checkpoints / "final"
    again = job(tmp_path / "again", final, 2)
    shutil.copytree(final, again.base / "input/data/previous")
    code, _, text = again.run()
    assert code == 0, text


@pytest.mark.slow
def test_latents_of_components_of_equal_shapes_are_not_trained_on(
    tmp_path: Path, folders: tuple[Path, Path], cli: Any
) -> None:
    from tests.support.cluster.latents_support import latent_channels, latent_job, pack

    first, second = folders
    assert pack(cli, tmp_path, first).returncode == 0
    trained = latent_job(tmp_path / "job", max_steps=1)
    latent_channels(trained, tmp_path / "out", second)
    code, events, text = trained.run()
    assert code == 0, text
    [warning] = [event for event in events if event.get("code") == "latents-model-mismatch"]
    new = frozen_identities(LocalComponents(second))
    assert f"→ {new['text_encoder']} (sampled)" in warning["message"]
    start = next(event for event in events if event["kind"] == "start")
    assert start["input_kind"] == "images"

"""What a model folder may hold: `sample` and `export` refuse the same, and export an allow-list."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sm_train.entrypoints.checkpoints.checkpoint_files import CheckpointError
from sm_train.entrypoints.models.checkpoint_export import ExportOptions, export
from sm_train.entrypoints.models.image_sampling import ModelSource, find_source, load_pipeline

from tests.support.models import build, write_checkpoint


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that sm-train wrote."""
    folder = tmp_path_factory.mktemp("model")
    copy_model(find_source(write_checkpoint(build("tiny-sd2"), folder)), folder / "model")
    return folder / "model"


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model"))


def copy_model(source: ModelSource, out: Path) -> None:
    scratch = out.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    export(source, ExportOptions("diffusers"), out, scratch, lambda size: None)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def only_a_pickle(model: Path) -> None:
    (model / "vae" / "diffusion_pytorch_model.safetensors").rename(
        model / "vae" / "diffusion_pytorch_model.bin"
    )


def remote_code(model: Path) -> None:
    edit(model / "text_encoder" / "config.json", auto_map={"AutoModel": "code.Model"})


def other_pipeline(model: Path) -> None:
    (model / "pipeline.py").write_text("import os\n")


def other_library(model: Path) -> None:
    edit(model / "model_index.json", vae=["my_package", "Autoencoder"])


def other_class(model: Path) -> None:
    edit(model / "vae" / "config.json", _class_name="ConsistencyDecoderVAE")


def damaged_header(model: Path) -> None:
    path = model / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(b"\xff" * 7 + b"\x7f" + path.read_bytes()[8:])


def link_out(model: Path) -> None:
    secret = model.parent / "secret.json"
    secret.write_text("{}")
    (model / "tokenizer" / "added.json").symlink_to(secret)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (only_a_pickle, "vae/diffusion_pytorch_model.bin: only pickled weights"),
        (remote_code, "text_encoder/config.json: auto_map names code in the folder"),
        (other_pipeline, "pipeline.py holds code that sm-train did not write"),
        (other_library, "model_index.json: vae is a class of my_package"),
        (other_class, "vae is a ConsistencyDecoderVAE, none of AutoencoderKL"),
        (damaged_header, "unet/diffusion_pytorch_model.safetensors"),
        (link_out, "added.json: links to a file outside of the model's folder"),
    ],
)
def test_what_sampling_refuses_is_not_exported(
    model: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    change(model)
    with pytest.raises(CheckpointError) as sampled:
        load_pipeline(find_source(model))
    with pytest.raises(CheckpointError) as copied:
        copy_model(find_source(model), tmp_path / "out")
    assert message in str(copied.value)
    assert str(copied.value) == str(sampled.value)
    assert len(str(copied.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_only_files_of_the_model_are_exported(model: Path, tmp_path: Path) -> None:
    expected = {path.relative_to(model) for path in model.rglob("*") if path.is_file()}
    (model / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"pickle")
    (model / "optimizer.pt").write_bytes(b"pickle")
    (model / "notes.sh").write_text("echo")
    (model / "settings.json").write_text("{}")
    (model / "doctor").mkdir()
    (model / "doctor" / "report.html").write_text("x")
    (model / "LICENSE.md").write_text("terms")
    copy_model(find_source(model), tmp_path / "out")
    found = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.*")}
    assert found == expected | {Path("LICENSE.md")}


def test_links_into_the_hubs_cache_are_followed(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--team--model"
    snapshot = cache / "snapshots" / "abc"
    (cache / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(model.rglob("*.*"))):
        blob = cache / "blobs" / str(number)
        link = snapshot / path.relative_to(model)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blob)
        link.symlink_to(blob)
    load_pipeline(find_source(snapshot))
    copy_model(find_source(snapshot), tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    (cache / "outside").write_text("{}")
    (snapshot / "tokenizer" / "more.json").symlink_to(cache / "outside")
    with pytest.raises(CheckpointError, match=r"more\.json: links to a file outside"):
        load_pipeline(find_source(snapshot))

"""The bundle: reproducible, complete, and nothing of this machine in it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from sm_train.estimators.bundle import build_bundle, requirements

from tests.estimators.runs import config


def test_same_inputs_same_bytes() -> None:
    first = build_bundle(config(), "2.10.0").archive
    assert build_bundle(config(), "2.10.0").archive == first
    assert first[4:8] == bytes(4), "gzip's time stamp"
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        assert {(entry.mtime, entry.uid, entry.mode) for entry in archive} == {(0, 0, 0o644)}


def test_another_run_file_is_another_digest() -> None:
    other = build_bundle(config(name="b"), "2.10.0")
    assert build_bundle(config(), "2.10.0").sha256 != other.sha256


def test_the_list_is_what_is_in_the_archive() -> None:
    bundle = build_bundle(config(), "2.10.0")
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as archive:
        inside = [(entry.name, entry.size) for entry in archive.getmembers()]
    assert [(file.path, file.bytes) for file in bundle.files] == inside
    names = [name for name, _ in inside]
    assert "train.py" in names
    assert "requirements.txt" in names
    assert "sm_train/entrypoints/train.py" in names
    assert "sm_train/entrypoints/presets/sd2.json" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith("sm_train/t")]


def test_the_run_document_is_the_whole_run_without_the_laptops_folders() -> None:
    run = config(data={"uri": "s3://my-bucket/shards/", "local": "/home/someone/shards"})
    bundle = build_bundle(run, "2.10.0")
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as archive:
        file = archive.extractfile("run.json")
        assert file is not None
        document = json.load(file)
    assert document["training"]["precision"] == "bf16"
    assert document["stages"][0]["accumulation"] == 2
    assert b"/home/someone" not in bundle.archive
    assert "local" not in document["data"]


def test_unpacked_it_imports_its_own_code_and_nothing_of_the_laptop(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(build_bundle(config(), "2.10.0").archive)) as archive:
        archive.extractall(tmp_path, filter="data")
    program = (
        "import sys, sm_train.entrypoints.events as events\n"
        "print(events.__file__, [name for name in sys.modules if name.startswith('sm_train.')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.stdout.startswith(str(tmp_path))
    assert "toolkit" not in result.stdout
    assert "estimators" not in result.stdout


def test_the_old_images_get_libraries_that_import_on_their_pytorch() -> None:
    assert "transformers==4." in requirements("2.3.0")
    assert "transformers==5." in requirements("2.10.0")
    assert requirements(None) == requirements("2.10.0")

"""The bundle: reproducible, complete, and nothing of this machine in it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from sm_train.estimators.bundle.bundle import build_bundle, bundle_again, requirements, unpack
from sm_train.estimators.bundle.user_code import CodeError, read_code

from tests.support.run_documents import ECR, config


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
    assert "sm_train/entrypoints/models/presets/sd2.json" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith("sm_train/t")]


def test_the_run_document_is_the_whole_run_without_the_laptops_folders() -> None:
    run = config(data={"uri": "s3://my-bucket/shards/", "local": "/home/someone/shards"})
    bundle = build_bundle(run, "2.10.0")
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as archive:
        file = archive.extractfile("run.json")
        assert file is not None
        document = json.load(file)
    assert document["training"]["precision"] == "bf16"
    assert document["stages"][0]["gradient_accumulation_steps"] == 2
    assert b"/home/someone" not in bundle.archive
    assert "local" not in document["data"]


def test_unpacked_it_imports_its_own_code_and_nothing_of_the_laptop(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(build_bundle(config(), "2.10.0").archive)) as archive:
        archive.extractall(tmp_path, filter="data")
    program = (
        "import sys, sm_train.entrypoints.common.events as events\n"
        "print(events.__file__, [name for name in sys.modules if name.startswith('sm_train.')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert result.stdout.startswith(str(tmp_path))
    assert "toolkit" not in result.stdout
    assert "estimators" not in result.stdout


def test_the_old_images_get_libraries_that_import_on_their_pytorch() -> None:
    assert "transformers==4." in requirements("2.3.0")
    assert "transformers==5." in requirements("2.10.0")
    assert requirements(None) == requirements("2.10.0")


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_own_code_goes_along_without_what_its_ignore_file_and_habit_leave_out(
    tmp_path: Path,
) -> None:
    own = read_code(
        write(
            tmp_path,
            {
                "own/model.py": "",
                "notes.md": "",
                "data/big.bin": "",
                "data/small.json": "",
                ".smtrainignore": "# what no job needs\n*.md\n/data/*\n!/data/small.json\n",
                ".git/config": "",
                ".env": "",
                "own/__pycache__/model.pyc": "",
            },
        )
    )
    assert own.files.keys() == {"own/model.py", "data/small.json"}
    bundle = build_bundle(config(code="."), "2.10.0", own)
    assert {"own/model.py", "data/small.json", "train.py"} < unpack(bundle.archive).keys()
    assert bundle.entry == "train.py"


def test_a_linked_folder_is_not_left_behind_in_silence(tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"a.py": ""})
    write(tmp_path / "elsewhere", {"b.py": ""})
    (code / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CodeError, match="linked is a link to a folder"):
        read_code(code)
    write(code, {".smtrainignore": "linked/\n"})
    assert read_code(code).files.keys() == {"a.py"}


def test_an_entry_of_ones_own_replaces_ours(tmp_path: Path) -> None:
    own = read_code(write(tmp_path, {"jobs/own.py": "print('own')"}))
    run = config(code="somewhere", entry="jobs/own.py")
    bundle = build_bundle(run, "2.10.0", own)
    assert bundle.entry == "jobs/own.py"
    files = unpack(bundle.archive)
    assert "train.py" not in files
    document = json.loads(files["run.json"])
    assert (document["code"], document["entry"]) == (".", "jobs/own.py")


@pytest.mark.parametrize(
    ("files", "entry", "complaint"),
    [
        ({"a.py": ""}, "b.py", "entry: b.py is not among the files of code"),
        ({"train.py": ""}, None, "code: train.py is a name of sm-train's own"),
        ({"sm_train/__init__.py": ""}, None, "code: sm_train/__init__.py is a name"),
        ({"a.py": "", "run.json": ""}, "a.py", "code: run.json is a name of sm-train's own"),
    ],
)
def test_own_code_that_does_not_fit_is_refused(
    tmp_path: Path, files: dict[str, str], entry: str | None, complaint: str
) -> None:
    own = read_code(write(tmp_path, files))
    with pytest.raises(CodeError, match=complaint):
        build_bundle(config(code=".", entry=entry), "2.10.0", own)


def test_a_train_py_of_ones_own_is_taken_where_it_is_the_entry(tmp_path: Path) -> None:
    own = read_code(write(tmp_path, {"train.py": "# own"}))
    bundle = build_bundle(config(code=".", entry="train.py"), "2.10.0", own)
    assert unpack(bundle.archive)["train.py"] == b"# own"


def test_a_secret_in_own_code_is_refused_by_file_and_line(tmp_path: Path) -> None:
    token, key = "hf_" + "a" * 34, "AKIA" + "ABCDEFGHIJKLMNOP"
    own = read_code(
        write(
            tmp_path, {"a.py": f"import x\n\nlogin('{token}')\n", "b/c.json": f'{{"k": "{key}"}}'}
        )
    )
    with pytest.raises(CodeError) as caught:
        build_bundle(config(code="."), "2.10.0", own)
    assert str(caught.value).splitlines() == [
        "a.py:3: looks like a Hugging Face token; take it out of what is uploaded",
        "b/c.json:1: looks like an AWS access key; take it out of what is uploaded",
    ]


def test_own_packages_come_behind_ours_and_their_version_counts(tmp_path: Path) -> None:
    text = "einops==0.8.1  # shapes\n\n# newer\nSafeTensors==0.7.0\n"
    own = read_code(write(tmp_path, {"requirements.txt": text}))
    lines = unpack(build_bundle(config(code="."), "2.10.0", own).archive)["requirements.txt"]
    packages = lines.decode().splitlines()
    assert packages[-3:] == ["# The run's own:", "einops==0.8.1", "SafeTensors==0.7.0"]
    assert not [line for line in packages if line.startswith("safetensors")]
    assert [line for line in packages if line.startswith("diffusers==")]


def test_own_packages_that_break_the_image_are_refused(tmp_path: Path) -> None:
    text = "einops\ntorch==2.9.0\nnumpy>=1\nb @ https://example.com/b.whl\n???\nc==1.*\n"
    write(tmp_path, {"requirements.txt": text})
    with pytest.raises(CodeError) as caught:
        read_code(tmp_path)
    assert [line.partition("requirements.txt:")[2] for line in str(caught.value).splitlines()] == [
        "1: einops has no exact version; write einops==1.2.3",
        "2: torch is the image's own; choose it by cluster.framework_version",
        "3: numpy has no exact version; write numpy==1.2.3",
        "5: not a requirement that pip reads; write name==1.2.3",
        "6: c has no exact version; write c==1.2.3",
    ]


def test_every_package_of_ours_has_one_exact_version() -> None:
    for version in ("2.3.0", "2.10.0"):
        lines = [line for line in requirements(version).splitlines() if not line.startswith("#")]
        # The image's NumPy stays, whatever its version below 2: its PyTorch was built for it.
        assert [line for line in lines if "==" not in line] == ["numpy<2"] * (version == "2.3.0")
        assert not [line for line in lines if line.startswith("torch")]


def test_an_isolated_job_installs_nothing() -> None:
    isolated = {"instance_type": "ml.p5.48xlarge", "image": ECR, "network_isolation": True}
    bundle = build_bundle(config(cluster=isolated), None)
    assert "requirements.txt" not in unpack(bundle.archive)


def test_a_bundle_again_is_the_same_code_with_another_document(tmp_path: Path) -> None:
    own = read_code(write(tmp_path, {"own.py": "1", "requirements.txt": "einops==0.8.1"}))
    run = config(code=".", entry="own.py")
    first = build_bundle(run, "2.10.0", own)
    assert bundle_again(first.archive, run, "2.10.0", same_image=True) == first
    other = bundle_again(
        first.archive, config(name="b", code=".", entry="own.py"), "2.3.0", same_image=False
    )
    before, after = unpack(first.archive), unpack(other.archive)
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed == {"run.json", "requirements.txt"}
    assert b"transformers==4." in after["requirements.txt"]
    assert after["requirements.txt"].endswith(b"einops==0.8.1\n")

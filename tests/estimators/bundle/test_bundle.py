"""The bundle is reproducible, complete, and independent of the machine that packs it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import pytest
from sm_train.entrypoints.job_interface.job_config import JOB_FILE, read_job_config
from sm_train.estimators.bundle.bundle import (
    build_bundle,
    rebuild_bundle,
    requirements,
    unpack,
)
from sm_train.estimators.bundle.job_configs import job_configs
from sm_train.estimators.bundle.user_code import UserCodeError, read_user_code
from sm_train.estimators.config.schema import RunConfig

from tests.support.run_documents import ECR, config, stage

SHARED_SECTIONS = (
    "data",
    "model",
    "training",
    "evaluation",
    "checkpoint",
    "heartbeat",
    "alerts",
    "doctor",
)


def test_same_inputs_give_same_bytes() -> None:
    first = build_bundle(config(), "2.13.0").archive
    assert build_bundle(config(), "2.13.0").archive == first
    assert first[4:8] == bytes(4), "gzip time stamp"
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        assert {(member.mtime, member.uid, member.mode) for member in archive} == {(0, 0, 0o644)}


def test_different_run_file_gives_different_digest() -> None:
    other = build_bundle(config(name="b"), "2.13.0")
    assert build_bundle(config(), "2.13.0").sha256 != other.sha256


def test_file_list_matches_the_archive() -> None:
    bundle = build_bundle(config(), "2.13.0")
    with tarfile.open(fileobj=io.BytesIO(bundle.archive)) as archive:
        members = [(member.name, member.size) for member in archive.getmembers()]
    assert [(file.path, file.bytes) for file in bundle.files] == members
    names = [name for name, _ in members]
    assert "train.py" in names
    assert "requirements.txt" in names
    assert "sm_train/entrypoints/training/train.py" in names
    assert "sm_train/entrypoints/models/presets/sd2.json" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith("sm_train/t")]


def test_run_file_is_complete_except_for_local_folders() -> None:
    run = config(data={"uri": "s3://ai-bucket/shards/", "local": "/home/someone/shards"})
    archive = build_bundle(run, "2.13.0").archive
    document = json.loads(unpack(archive)["run.json"])
    without_local = config(data={"uri": "s3://ai-bucket/shards/"})
    assert RunConfig.model_validate(document) == without_local
    assert "local" not in document["data"]
    assert b"/home/someone" not in archive


def test_job_file_round_trips_every_stage(tmp_path: Path) -> None:
    """What the job reads equals what the run file produced, types included."""
    run = config(
        stages=[stage(), stage("512px", optimizer_state="keep")],
        evaluation={"prompts": ["a", "b"]},
    )
    path = tmp_path / JOB_FILE
    path.write_bytes(unpack(build_bundle(run, "2.13.0").archive)["job.json"])
    jobs = job_configs(run)
    assert list(jobs) == ["256px", "512px"]
    for name, job in jobs.items():
        assert read_job_config(path, name) == job
    assert jobs["512px"].evaluation.prompts == ("a", "b")


def test_jobs_receive_the_stated_or_the_predicted_speed() -> None:
    run = config(
        stages=[stage(), stage("512px", steps_per_second=None), stage("x", steps_per_second=None)]
    )
    jobs = job_configs(run, {"256px": 9.0, "512px": 0.8})
    expected = [(job.expected.steps_per_second, job.expected.speed_source) for job in jobs.values()]
    assert expected == [
        (1.8, "the run file states it"),
        (0.8, "not measured: the cost model predicts it"),
        (None, None),
    ]
    bundle = build_bundle(run, "2.13.0", predicted_speeds={"512px": 0.8})
    document = json.loads(unpack(bundle.archive)["job.json"])
    assert document["512px"]["expected"]["steps_per_second"] == 0.8


def test_job_config_has_every_value_of_its_section() -> None:
    """A field of the same name has the same value on both ends."""
    run = config(
        data={"uri": "s3://ai-bucket/shards/", "crop": "random"},
        training={"seed": 7, "warmup_steps": 3, "ema_start": 5, "log_every": 11},
    )
    job = job_configs(run)["256px"]
    sections = {name: getattr(run, name) for name in SHARED_SECTIONS} | {"stage": run.stages[0]}
    for name, section in sections.items():
        values = section.model_dump()
        values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        if name == "stage":
            # A key that states the strategy is the reason for it.
            values["sharding_reason"] = "stages[].sharding"
        # Captions and extra files are sent as tuples of sources.
        values |= {key: () for key in ("caption", "extras") if values.get(key) == {}}
        # Choices with options of their own get their defaults when the job configuration is made.
        sent = {
            key: value
            for key, value in asdict(getattr(job, name)).items()
            if not isinstance(value, dict)
        }
        assert {key: values[key] for key in sent} == sent, name


def test_unpacked_bundle_imports_only_its_own_packages(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(build_bundle(config(), "2.13.0").archive)) as archive:
        archive.extractall(tmp_path, filter="data")
    program = (
        "import sys, sm_train.entrypoints.job_interface.events as events\n"
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


def test_requirements_match_the_pytorch_version() -> None:
    assert "transformers==4.46" in requirements("2.3.0")
    assert "transformers==4.55" in requirements("2.4.0") == requirements("2.5.1")
    assert "transformers==5." in requirements("2.13.0")
    assert requirements(None) == requirements("2.13.0")


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_user_code_is_bundled_without_ignored_files(
    tmp_path: Path,
) -> None:
    user_code = read_user_code(
        write_files(
            tmp_path,
            {
                "own/model.py": "",
                "notes.md": "",
                "data/big.bin": "",
                "data/small.json": "",
                ".smtrainignore": "# not needed by jobs\n*.md\n/data/*\n!/data/small.json\n",
                ".git/config": "",
                ".env": "",
                "own/__pycache__/model.pyc": "",
            },
        )
    )
    assert user_code.files.keys() == {"own/model.py", "data/small.json"}
    bundle = build_bundle(config(code="."), "2.13.0", user_code)
    assert {"own/model.py", "data/small.json", "train.py"} < unpack(bundle.archive).keys()
    assert bundle.entry == "train.py"


def test_link_to_a_file_outside_the_code_is_an_error_unless_ignored(tmp_path: Path) -> None:
    code = tmp_path / "code"
    write_files(code, {"own.py": "x = 1"})
    (tmp_path / "private.txt").write_text("of another project")
    (code / "inside.py").symlink_to("own.py")
    (code / "notes.txt").symlink_to("../private.txt")
    with pytest.raises(UserCodeError, match=r"notes.txt is a link to .*private.txt, outside the f"):
        read_user_code(code)
    write_files(code, {".smtrainignore": "notes.txt\n"})
    assert read_user_code(code).files == {"inside.py": b"x = 1", "own.py": b"x = 1"}
    (code / os.fsdecode(b"\xff.py")).write_text("")
    with pytest.raises(UserCodeError, match=r"\.py: the name is not UTF-8; rename it"):
        read_user_code(code)


def test_code_may_be_a_link_to_a_folder(tmp_path: Path) -> None:
    write_files(tmp_path / "project", {"own.py": "x = 1"})
    (tmp_path / "code").symlink_to("project")
    assert read_user_code(tmp_path / "code").files == {"own.py": b"x = 1"}


def test_linked_folder_is_an_error_unless_ignored(tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"a.py": ""})
    write_files(tmp_path / "other", {"b.py": ""})
    (code / "linked").symlink_to(tmp_path / "other")
    with pytest.raises(UserCodeError, match="linked is a link to a folder"):
        read_user_code(code)
    write_files(code, {".smtrainignore": "linked/\n"})
    assert read_user_code(code).files.keys() == {"a.py"}


def test_entry_replaces_the_training_script(tmp_path: Path) -> None:
    user_code = read_user_code(write_files(tmp_path, {"jobs/own.py": "print('own')"}))
    run = config(code="somewhere", entry="jobs/own.py", entry_args=["--seed", "{seed}"])
    bundle = build_bundle(run, "2.13.0", user_code)
    files = unpack(bundle.archive)
    # A script of ours starts and observes it.
    assert b"run_entry" in files[bundle.entry]
    assert "train.py" not in files
    job = json.loads(files["job.json"])["256px"]
    assert (job["entry"], job["entry_args"]) == ("jobs/own.py", ["--seed", "{seed}"])
    document = json.loads(files["run.json"])
    assert (document["code"], document["entry"]) == (".", "jobs/own.py")


@pytest.mark.parametrize(
    ("files", "entry", "message"),
    [
        ({"a.py": ""}, "b.py", "entry: b.py is not among the files of code"),
        ({"train.py": ""}, None, "code: train.py is a reserved name in the bundle"),
        ({"sm_train/__init__.py": ""}, None, "code: sm_train/__init__.py is a reserved name"),
        ({"a.py": "", "run.json": ""}, "a.py", "code: run.json is a reserved name"),
        ({"a.py": "", "job.json": ""}, "a.py", "code: job.json is a reserved name"),
        ({"a.py": "", "start_entry.py": ""}, "a.py", "code: start_entry.py is a reserved name"),
    ],
)
def test_conflicting_user_code_is_rejected(
    tmp_path: Path, files: dict[str, str], entry: str | None, message: str
) -> None:
    user_code = read_user_code(write_files(tmp_path, files))
    with pytest.raises(UserCodeError, match=message):
        build_bundle(config(code=".", entry=entry), "2.13.0", user_code)


def test_user_code_may_contain_train_py_as_entry(tmp_path: Path) -> None:
    user_code = read_user_code(write_files(tmp_path, {"train.py": "# own"}))
    bundle = build_bundle(config(code=".", entry="train.py"), "2.13.0", user_code)
    assert unpack(bundle.archive)["train.py"] == b"# own"


def test_credential_in_user_code_is_rejected_with_file_and_line(tmp_path: Path) -> None:
    token, key = "hf_" + "a" * 34, "AKIA" + "ABCDEFGHIJKLMNOP"
    user_code = read_user_code(
        write_files(
            tmp_path, {"a.py": f"import x\n\nlogin('{token}')\n", "b/c.json": f'{{"k": "{key}"}}'}
        )
    )
    with pytest.raises(UserCodeError) as caught:
        build_bundle(config(code="."), "2.13.0", user_code)
    assert str(caught.value).splitlines() == [
        "a.py:3: looks like a Hugging Face token; remove it from the file",
        "b/c.json:1: looks like an AWS access key; remove it from the file",
    ]


def test_references_to_kubernetes_secrets_are_not_taken_for_credentials() -> None:
    secrets = {
        "SM_TRAIN_SLACK_WEBHOOK": "team-alerts/slack-webhook-url",
        "WANDB_API_KEY": "tracking/wandb-key-2026",
        "AWS_SECRET_ACCESS_KEY": "store/key",
        "MLFLOW_TRACKING_PASSWORD": "mlflow-prod/pw2",
    }
    bundle = build_bundle(config(kubernetes={"secrets": secrets}), "2.13.0")
    assert "tracking/wandb-key-2026" in unpack(bundle.archive)["run.json"].decode()


def test_user_packages_are_installed_separately_from_those_with_hashes(tmp_path: Path) -> None:
    text = "einops==0.8.1  # shapes\n\n# newer\nSafeTensors==0.7.0\n--extra-index-url https://a.b\n"
    user_code = read_user_code(write_files(tmp_path, {"requirements.txt": text}))
    contents = unpack(build_bundle(config(code="."), "2.13.0", user_code).archive)
    lines = contents["requirements-user.txt"].decode().splitlines()
    assert lines == ["einops==0.8.1", "SafeTensors==0.7.0", "--extra-index-url https://a.b"]
    # One package without a hash would make pip reject the whole file.
    assert contents["requirements.txt"].decode() == f"--require-hashes\n{requirements('2.13.0')}"


def test_user_packages_must_be_pinned_and_leave_pytorch_alone(tmp_path: Path) -> None:
    text = "einops\ntorch==2.9.0\nnumpy>=1\nb @ https://example.com/b.whl\n???\nc==1.*\n"
    write_files(tmp_path, {"requirements.txt": text})
    with pytest.raises(UserCodeError) as caught:
        read_user_code(tmp_path)
    assert [line.partition("requirements.txt:")[2] for line in str(caught.value).splitlines()] == [
        "1: einops has no exact version; write einops==1.2.3",
        "2: torch is part of the image; select its version with cluster.framework_version",
        "3: numpy has no exact version; write numpy==1.2.3",
        "5: not a requirement that pip can parse; write name==1.2.3",
        "6: c has no exact version; write c==1.2.3",
    ]


def test_every_pinned_package_has_hashes() -> None:
    folder = Path(str(files("sm_train.estimators") / "data"))
    pinned = sorted(folder.glob("requirements*.txt"))
    assert {path.stem for path in pinned} == {path.stem for path in folder.glob("*.in")}
    for path in pinned:
        text = path.read_text().replace("\\\n", "")
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        bare = [line for line in lines if not re.match(r"\S+==.* --hash=sha256:[0-9a-f]{64}", line)]
        assert bare == [], path


@pytest.mark.parametrize("version", ["2.3.0", "2.5.1", "2.13.0"])
def test_all_packages_of_a_job_have_hashes(version: str) -> None:
    text = requirements(version).replace("\\\n", "")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert all(re.match(r"[a-z0-9-]+==[^ ]+ .*--hash=sha256:[0-9a-f]{64}", line) for line in lines)
    names = {line.partition("==")[0] for line in lines}
    # What the direct packages need is pinned as well, but not what the image includes.
    assert {"diffusers", "huggingface-hub", "numpy", "regex"} <= names
    assert not {name for name in names if name.startswith(("torch", "nvidia-c"))}
    # PyTorch 2.3 was built for NumPy 1.
    assert ("numpy==1." in text) == (version != "2.13.0")


def test_isolated_job_installs_nothing() -> None:
    isolated = {"instance_type": "ml.p5.48xlarge", "image": ECR, "network_isolation": True}
    bundle = build_bundle(config(cluster=isolated), None)
    assert not {"requirements.txt", "requirements-user.txt"} & unpack(bundle.archive).keys()


def test_rebuilt_bundle_keeps_the_code_and_changes_the_run_file(tmp_path: Path) -> None:
    user_code = read_user_code(
        write_files(tmp_path, {"own.py": "1", "requirements.txt": "einops==0.8.1"})
    )
    run = config(code=".", entry="own.py")
    first = build_bundle(run, "2.13.0", user_code)
    assert rebuild_bundle(first.archive, run, "2.13.0", same_image=True) == first
    other = rebuild_bundle(
        first.archive, config(name="b", code=".", entry="own.py"), "2.3.0", same_image=False
    )
    before, after = unpack(first.archive), unpack(other.archive)
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed == {"run.json", "job.json", "requirements.txt"}
    assert b"transformers==4." in after["requirements.txt"]
    assert after["requirements-user.txt"] == b"einops==0.8.1\n"

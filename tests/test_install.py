"""The base install: its commands run without the extras, and it stays small."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.support.finished_jobs import training_events
from tests.support.image_files import write_album
from tests.support.run_files import write_run
from tests.wheel_files import ROOT, build_wheel, install_base

pytestmark = pytest.mark.integration

MOST_MEGABYTES = 350
MOST_CPU_SECONDS = 60

PYTHONS = ("3.11", "3.12", "3.13")

COMMANDS = {
    "init": ["init", "new.yaml", "--no-input"],
    "cost": ["cost", "run.yaml", "--json"],
    "check": ["check", "run.yaml", "--offline", "--json"],
    "pack": ["pack", "album", "packed", "--workers", "1", "--json"],
    "plan": ["submit", "run.yaml", "--dry-run", "--json"],
    "review": ["review", "logs", "--json"],
    "diagnose": ["diagnose", "logs", "--json"],
    "iam": ["iam", "run.yaml"],
    "index": ["index", "packed/shards", "--json"],
    "image": ["image", "run.yaml"],
    "schema": ["schema"],
    "instances": ["instances", "--gpu", "a100"],
    "config": ["config", "--json"],
    "measure": ["measure", "run.yaml", "--stage", "256px", "--dry-run"],
    "template": ["template", "pack-lambda"],
    "completion": ["completion", "bash"],
    "help": ["--help"],
    "version": ["--version"],
}
"""Commands of the base install, in the order in which they run in one folder."""

MESSAGES = {
    "init": r"Wrote new.yaml\nFill in: role, data.uri\nNext: sm-train submit new.yaml --dry-run\n",
    "pack": r"packed 3 samples into 1 shard \(0\.0 MB\) in packed/shards\n",
    "iam": r"(\w+: .+\n){10}",
    "index": r"packed/index\.parquet is up to date: 3 samples in 1 shards \(0\.0 MB\)\n",
    "measure": r"Measure 256px\n(.*\n){3}",
}
"""What these commands report on standard error; the others report nothing."""

EXTRAS = {
    "aws": ["submit", "run.yaml", "--yes"],
    "status": ["--region", "us-east-1", "status", "demo"],
    "check online": ["check", "run.yaml"],
    "pack from S3": ["--region", "us-east-1", "pack", "s3://bucket/photos/", "other"],
    "review of a job": ["--region", "us-east-1", "review", "demo"],
    "doctor": ["doctor", "run.yaml", "--local"],
    "train": ["sample", "logs", "--prompts", "prompts.txt"],
    "local": ["submit", "run.yaml", "--local"],
    "page of review": ["review", "logs", "--html", "review.html"],
    "page of cost": ["cost", "run.yaml", "--html", "cost.html"],
    "export": ["review", "logs", "--export", "tensorboard"],
    "hub": ["check", "run.yaml", "--offline", "--components", "owner/model"],
    "heic": ["pack", "phone", "other", "--convert"],
    "where": ["pack", "scores.csv", "other", "--where", "aesthetic > 5"],
    "framework": [
        *("submit", "run.yaml", "--dry-run"),
        *("--set", "cluster.framework_version=9.9.9", "--set", "cluster.backend=nccl"),
    ],
}
"""Commands that need an extra."""

INSTALLS = {
    "aws": "aws",
    "status": "aws",
    "check online": "aws",
    "pack from S3": "aws",
    "review of a job": "aws",
    "doctor": "train",
    "train": "train",
    "local": "train",
    "page of review": "report",
    "page of cost": "report",
    "export": "tensorboard",
    "hub": "hub",
    "heic": "heic",
    "where": "where",
    "framework": "aws",
}

PROGRAM = """
import contextlib, io, json, sys, traceback
from sm_train.toolkit.cli import main

def run(arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            return end.code or 0, out.getvalue(), err.getvalue()
        except BaseException:
            return 99, "", traceback.format_exc()
    return 0, out.getvalue(), err.getvalue()

commands = json.loads(sys.argv[1])
print(json.dumps({name: run(arguments) for name, arguments in commands.items()}))
"""


def write_inputs(folder: Path) -> None:
    """Write what the commands read: a run file, images, and the log of a finished job."""
    write_run(folder)
    write_album(folder / "album", 3)
    phone = write_album(folder / "phone", 1)
    (phone / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic")
    (phone / "photo.txt").write_text("a photo")
    (folder / "logs").mkdir()
    lines = [f"{event['message']}\n" for event in training_events()]
    (folder / "logs" / "algo-1.log").write_text("".join(lines))
    (folder / "scores.csv").write_text("image,caption,aesthetic\nalbum/0.jpg,a dune,6\n")
    (folder / "prompts.txt").write_text("a dune\n")


def test_base_commands_need_no_extra(tmp_path: Path) -> None:
    """In an environment that has the wheel and the base requirements only."""
    python = install_base(build_wheel(tmp_path / "wheel"), tmp_path / "venv")
    write_inputs(tmp_path)
    ran = _run(tmp_path, python, "-c", PROGRAM, json.dumps(COMMANDS | EXTRAS))
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout)
    # `check` exits with 3 if it finds an error in the run file.
    failed = {name: results[name] for name in COMMANDS if results[name][0] not in (0, 3)}
    assert failed == {}
    for name, extra in INSTALLS.items():
        code, _, message = results[name]
        errors = [line for line in message.splitlines() if line.startswith("sm-train: ")]
        assert code == 2, (name, message)
        assert len(errors) == 1, (name, message)
        assert f'pip install "sm-train[{extra}]"' in errors[0], (name, message)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("version", PYTHONS)
def test_base_commands_report_nothing_unexpected_on_every_python(
    version: str, wheel: Path, tmp_path: Path
) -> None:
    """Installed with pip, with the pinned versions; a Python that is not found is skipped."""
    python = find_python(version)
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    binaries = tmp_path / "venv" / "bin"
    (tmp_path / "pins.txt").write_text("".join(f"{pin}\n" for pin in pinned_versions()))
    pip = [binaries / "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", tmp_path / "pins.txt", wheel], check=True, timeout=_INSTALL_SECONDS)
    write_inputs(tmp_path)
    unexpected = []
    for name, arguments in COMMANDS.items():
        ran = _run(tmp_path, binaries / "sm-train", *arguments)
        is_reported = re.fullmatch(MESSAGES.get(name, ""), ran.stderr)
        if ran.returncode != 0 or not is_reported:
            unexpected.append(f"{name}: exit code {ran.returncode}: {ran.stderr}")
    assert not unexpected, "\n".join(unexpected)


def find_python(version: str) -> str:
    """Return an interpreter of this version, from the path or pyenv; skip the test without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (
        shutil.which(f"python{version}"),
        *map(str, pyenv.glob(f"{version}.*/bin/python")),
    ):
        # pyenv's own python3.12 on the path fails unless that version is selected.
        if (
            found
            and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            return found
    pytest.skip(f"Python {version} is not installed")


def pinned_versions() -> list[str]:
    """Return the versions of the tests' environment, as constraints."""
    lines = (ROOT / "tests" / "environments" / "test.txt").read_text().splitlines()
    return [line.removesuffix(" \\") for line in lines if re.match(r"[a-z].*==", line)]


@pytest.mark.slow
def test_base_install_is_small_and_quick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installs the wheel with pip into a new environment, from the configured package index."""
    wheel = build_wheel(tmp_path / "wheel")
    subprocess.run(["python3", "-m", "venv", tmp_path / "venv"], check=True)
    binaries = tmp_path / "venv" / "bin"
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    before, began = _size(site), _child_cpu_seconds()
    pip = [binaries / "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    subprocess.run(pip, check=True, timeout=_INSTALL_SECONDS)
    megabytes, installing = (_size(site) - before) / 1e6, _child_cpu_seconds() - began
    write_inputs(tmp_path)
    seconds = {}
    for name, arguments in COMMANDS.items():
        began = _child_cpu_seconds()
        ran = _run(tmp_path, binaries / "sm-train", *arguments)
        assert ran.returncode in (0, 3), (name, ran.stderr)
        seconds[name] = round(_child_cpu_seconds() - began, 1)
    with capsys.disabled():
        print(f"base install: {megabytes:.0f} MB, {installing:.0f} s of CPU; commands: {seconds}")
    for name, extra in INSTALLS.items():
        ran = _run(tmp_path, binaries / "sm-train", *EXTRAS[name])
        assert (ran.returncode, ran.stdout) == (2, ""), (name, ran.stdout, ran.stderr)
        assert f'pip install "sm-train[{extra}]"' in ran.stderr, (name, ran.stderr)
    assert megabytes <= MOST_MEGABYTES
    assert installing <= MOST_CPU_SECONDS
    assert sum(seconds.values()) <= MOST_CPU_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["pipx", "uvx"])
def test_wheel_runs_from_pipx_and_uvx(tmp_path: Path, tool: str) -> None:
    """With the tools' newest releases, which are installed for this test alone."""
    wheel = build_wheel(tmp_path / "wheel")
    subprocess.run(["python3", "-m", "venv", tmp_path / "tools"], check=True)
    tools = tmp_path / "tools" / "bin"
    pip = [tools / "pip", "install", "--quiet", "--disable-pip-version-check"]
    package = "uv" if tool == "uvx" else tool
    subprocess.run([*pip, package], check=True, timeout=_INSTALL_SECONDS)
    if tool == "pipx":
        _run(tmp_path, tools / "pipx", "install", wheel).check_returncode()
        command = [tmp_path / ".local" / "bin" / "sm-train"]
    else:
        command = [tools / "uvx", "--from", wheel, "sm-train"]
    write_run(tmp_path)
    assert "Write a commented run file" in _run(tmp_path, *command, "--help").stdout
    priced = _run(tmp_path, *command, "cost", "run.yaml", "--json")
    assert json.loads(priced.stdout)["total"]["cost_usd"] > 0


_INSTALL_SECONDS = 3600
"""Enough for a slow package index: only CPU time is measured."""


def _run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``folder``, which is also its home, without this checkout's packages."""
    environment = clean_environment(folder) | {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",  # nothing answers there
    }
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_INSTALL_SECONDS,
        check=False,
    )


def _size(folder: Path) -> int:
    """Return the bytes of all files below ``folder``."""
    return sum(
        os.lstat(Path(root) / name).st_size for root, _, names in os.walk(folder) for name in names
    )


def _child_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

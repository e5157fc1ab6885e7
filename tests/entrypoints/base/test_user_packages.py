"""Tests of installing the packages of the user code, with pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sm_train.estimators.bundle.bundle import build_bundle, unpack
from sm_train.estimators.bundle.user_code import UserCode

from tests.entrypoints.base.user_packages_support import write_wheel
from tests.support.run_documents import config

pytestmark = pytest.mark.integration

RESOURCES = '{"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "lo"}'

LAUNCH = """
import sys
from sm_train.entrypoints.launcher import launch
launch.hyperparameters = lambda _: []
sys.exit(launch.main(["own.py"]))
"""
"""Launches own.py. Only the file of hyperparameters does not lie below the base folder."""


def unpack_bundle(folder: Path, package: str) -> Path:
    """Unpack a bundle whose user code needs ``package`` and whose entry imports it."""
    script = b"from smtown import VALUE\nprint('value', VALUE)\n"
    code = UserCode({"own.py": script}, (package,))
    bundle = build_bundle(config(code=".", entry="own.py"), "2.13.0", code)
    for name, content in unpack(bundle.archive).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return variables with which pip installs into ``folder``, not the tests' environment."""
    site = folder / "site"
    base = folder / "opt-ml"
    (base / "input/config").mkdir(parents=True, exist_ok=True)
    (base / "input/config/resourceconfig.json").write_text(RESOURCES)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {
        "PIP_TARGET": str(site),
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(site),
        "TMPDIR": str(folder),
        "SAGEMAKER_BASE_DIR": str(base),
    }


def test_ranks_that_mpi_started_install_the_packages_once(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    bundle = unpack_bundle(tmp_path / "code", f"smtown @ {wheel.as_uri()}")
    program = (
        "from sm_train.entrypoints.base.pip_install import install_under_mpi\n"
        "install_under_mpi()\nimport own\n"
    )
    for rank in range(2):
        # Removing the wheel makes a second installation fail.
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                cwd=bundle,
                env=environment(tmp_path) | {"OMPI_COMM_WORLD_RANK": str(number)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(3 - 2 * rank)
        ]
        assert [(process.communicate()[0], process.returncode) for process in ranks] == [
            ("value 7\n", 0)
        ] * len(ranks)
        wheel.unlink(missing_ok=True)


@pytest.mark.slow
def test_each_environment_of_a_node_gets_the_packages(tmp_path: Path) -> None:
    """A Slurm node keeps its temporary folder: the next image must not find another one's mark."""
    bundle = unpack_bundle(tmp_path / "code", f"smtown @ {write_wheel(tmp_path).as_uri()}")
    program = (
        "from sm_train.entrypoints.base.pip_install import install_user_packages\n"
        "install_user_packages()\n"
        "import importlib; importlib.invalidate_caches(); import own\n"
    )
    for name in ("first", "second", "first"):
        site = {"PIP_TARGET": str(tmp_path / name), "PYTHONPATH": str(tmp_path / name)}
        ran = subprocess.run(
            [sys.executable, "-c", program],
            cwd=bundle,
            env=environment(tmp_path) | site,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode, ran.stdout) == (0, "value 7\n"), ran.stderr
        if name == "second":  # the third time nothing is installed
            (tmp_path / "smtown-1.0-py3-none-any.whl").unlink()


def test_environment_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    bundle = unpack_bundle(tmp_path / "code", "smtown==9.9")
    (tmp_path / "file").touch()
    program = (
        "from sm_train.entrypoints.base.pip_install import install_user_packages\n"
        "install_user_packages()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=bundle,
        env=environment(tmp_path) | {"PIP_TARGET": str(tmp_path / "file" / "below")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "use an image whose Python environment the job's user can write to" in ran.stderr


def test_no_rank_installs_packages_where_the_launcher_does(tmp_path: Path) -> None:
    bundle = unpack_bundle(tmp_path / "code", "smtown==9.9")
    program = (
        "from sm_train.entrypoints.base.pip_install import install_under_mpi\ninstall_under_mpi()\n"
    )
    env = environment(tmp_path)
    subprocess.run([sys.executable, "-c", program], cwd=bundle, env=env, check=True)


def test_start_scripts_install_packages_under_mpi() -> None:
    code = UserCode({"own.py": b""}, ("smtown==1.0",))
    for entry, module in ((None, "training.train"), ("own.py", "script.run_entry")):
        bundle = build_bundle(config(code=".", entry=entry), "2.13.0", code)
        script = unpack(bundle.archive)[bundle.entry].decode()
        assert script.index("install_under_mpi()") < script.index(module)


@pytest.mark.slow
@pytest.mark.parametrize("exists", [True, False])
def test_launcher_installs_the_packages_or_names_the_failure(tmp_path: Path, exists: bool) -> None:
    package = f"smtown @ {write_wheel(tmp_path).as_uri()}" if exists else "smtown==9.9"
    bundle = unpack_bundle(tmp_path / "code", package)
    env = environment(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH],
        cwd=bundle,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    failure = Path(env["SAGEMAKER_BASE_DIR"]) / "output/failure"
    if exists:
        assert (done.returncode, "value 7" in done.stdout) == (0, True), done.stderr
        assert not failure.exists()
    else:
        assert done.returncode == 1
        assert "pip install -r requirements-user.txt failed with exit code 1" in failure.read_text()
        assert '"code":"packages-missing"' in done.stdout.replace('": "', '":"')

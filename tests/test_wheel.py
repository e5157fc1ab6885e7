"""The wheel holds every tracked file of the product and runs in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.wheel_files import FOLDERS, build_wheel, tracked_files

ROOT = Path(__file__).parent.parent

PROGRAM = """
import json, sys, traceback
from pathlib import Path
import yaml
import sm_train.toolkit
from sm_train.toolkit.cli import main

assert "ShardDataset" in sm_train.__all__

assert Path(sm_train.toolkit.__file__).is_relative_to(sys.prefix), sm_train.toolkit.__file__

def run(*arguments):
    try:
        main(list(arguments))
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

codes = {}
def commands(name):
    codes[f"{name} cost"] = run("cost", f"{name}.yaml", "--json")
    codes[f"{name} check"] = run("check", f"{name}.yaml", "--offline", "--json")
    codes[f"{name} submit"] = run("submit", f"{name}.yaml", "--dry-run", "--json")

for preset in ("default", "bria-2.0", "demo"):
    codes[f"init {preset}"] = run("init", f"{preset}.yaml", "--preset", preset)
    commands(preset)
for preset in sys.argv[1].split():
    document = yaml.safe_load(Path("default.yaml").read_text())
    document["model"] = {"preset": preset}
    Path(f"{preset}.yaml").write_text(yaml.safe_dump(document))
    commands(preset)
Path("codes.json").write_text(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked files alone."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.integration
def test_the_wheel_holds_every_tracked_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("sm_train/")}
    expected = {f"sm_train/{name}" for name in tracked_files() if name.partition("/")[0] in FOLDERS}
    # entrypoints/api is the package itself.
    installed = {name.replace("sm_train/entrypoints/api/", "sm_train/") for name in expected}
    assert packed == installed


def test_the_package_has_one_name() -> None:
    """A second copy under another name would have classes of its own."""
    imported = subprocess.run(
        [sys.executable, "-c", "import sm_train.entrypoints.api"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert imported.returncode == 1
    assert "ImportError: import sm_train instead of sm_train.entrypoints.api" in imported.stderr


def test_setup_cfg_lists_every_package() -> None:
    listed = {
        line.strip()
        for line in (ROOT / "setup.cfg").read_text().splitlines()
        if line.strip().startswith("sm_train.") and "=" not in line
    }
    folders = {
        "sm_train." + Path(name).parent.as_posix().replace("/", ".")
        for name in tracked_files()
        if name.endswith(".py") and not name.startswith("entrypoints/api/")
    }
    assert listed == folders


@pytest.mark.slow
@pytest.mark.integration
def test_an_installed_wheel_prices_checks_and_plans_every_preset(
    wheel: Path, tmp_path: Path
) -> None:
    """In a new environment that has the dependencies and, of sm-train, only the wheel."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # A path line adds the folder without reading the .pth files in it, so this checkout's own
    # editable install stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    presets = sorted(
        Path(name).stem
        for name in tracked_files()
        if "models/presets/" in name and "parts" not in name
    )
    environment = clean_environment(tmp_path)
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run(
        [python, "-c", PROGRAM, " ".join(presets)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    codes = json.loads((tmp_path / "codes.json").read_text())
    # `check` exits with 3 where it has findings: a 20 B model does not fit on 16 A100s.
    allowed = {name: {0, 3} if name.endswith("check") else {0} for name in codes}
    assert {name for name, code in codes.items() if code not in allowed[name]} == set(), ran.stderr

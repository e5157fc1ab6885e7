"""Wings: each is entered through few modules, and the core works without the optional ones."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sm_train.toolkit.base.errors import ExitCode
from sm_train.toolkit.commands._table import COMMANDS, COMMANDS_OF_WINGS

from tests.conftest import Aws, clean_environment
from tests.support.deadline import DEADLINE
from tests.support.import_graph import (
    FOLDERS,
    PACKAGE,
    ROOT,
    imports,
    is_for_type_checkers,
    modules,
)
from tests.support.run_files import write_run
from tests.toolkit.runs.run_lifecycle_support import FIRST, Laptop

HALVES = ("toolkit", "entrypoints")

FACE = ("commands", "api", "cli", "__main__")
"""What users call. It may enter a wing through any module."""

MOST_ENTRANCES = {"entrypoints/models": 14}
"""Wings that others enter through more than eight modules."""

OPTIONAL_WINGS = ("analysis", "clusters", "data_prep", "probes")
"""Wings that an installation may lack: nothing else imports them."""


def wing_of(name: str) -> str:
    """``sm_train.toolkit.records.job_logs`` → ``records``: one wing has a half in both folders."""
    _, folder, *rest = name.split(".")
    return rest[0] if folder in HALVES and rest else folder


def is_face(name: str) -> bool:
    _, folder, *rest = (*name.split("."), "")
    return folder in HALVES and rest[0] in FACE


def entrances() -> dict[str, set[str]]:
    """Return for each half of a wing the modules that other wings import."""
    found = defaultdict[str, set[str]](set)
    for name in modules():
        if is_face(name):
            continue
        for imported in imports(name) & modules().keys():
            _, folder, *rest = imported.split(".")
            if folder in HALVES and rest and wing_of(imported) != wing_of(name):
                found[f"{folder}/{rest[0]}"].add(".".join(rest[1:]))
    return found


def wings() -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for folder in HALVES
        for path in sorted((ROOT / folder).iterdir())
        if (path / "__init__.py").exists() and path.name != "api"
    ]


@pytest.mark.parametrize("wing", wings())
def test_a_wing_names_its_subject_and_its_entrances(wing: str) -> None:
    module = import_module(f"{PACKAGE}.{wing.replace('/', '.')}")
    assert module.__doc__
    assert set(getattr(module, "ENTRANCES", ())) == entrances().get(wing, set())
    assert len(entrances().get(wing, set())) <= MOST_ENTRANCES.get(wing, 8)


def test_nothing_imports_an_optional_wing() -> None:
    """Type checkers may: at run time its modules are found by their names."""
    found = {
        (name, imported)
        for name, path in modules().items()
        if wing_of(name) not in OPTIONAL_WINGS
        for imported in _imports_at_run_time(path)
        if imported.startswith(f"{PACKAGE}.") and wing_of(imported) in OPTIONAL_WINGS
    }
    assert found == set()


def _imports_at_run_time(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    pending, found = list[ast.AST]([tree]), set[str]()
    for node in pending:
        if isinstance(node, ast.stmt) and is_for_type_checkers(node):
            continue
        if isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        pending += ast.iter_child_nodes(node)
    return found


def test_wings_of_commands_are_those_of_the_folders() -> None:
    for wing in OPTIONAL_WINGS:
        files = (ROOT / "toolkit" / wing / "commands").glob("[a-z]*.py")
        assert {path.stem.replace("_", "-") for path in files} == set(COMMANDS_OF_WINGS[wing])
    assert COMMANDS_OF_WINGS.keys() == set(OPTIONAL_WINGS)


def product_without(wing: str, tmp_path: Path) -> dict[str, str]:
    """Return the environment in which programs find the product without a wing."""
    package = tmp_path / "product" / PACKAGE
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder,
            package / folder,
            ignore=lambda path, names: {"__pycache__"} | ({wing} & {*names}),
        )
    shutil.copy(ROOT / "entrypoints" / "api" / "__init__.py", package)
    return clean_environment(tmp_path) | {"PYTHONPATH": str(package.parent)}


_PROGRAM = """
import sys
# An editable installation would find the wing where it is.
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
from sm_train.toolkit.cli import main
main()
"""


def run(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM, *map(str, arguments)]
    return subprocess.run(
        command,
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.parametrize("wing", OPTIONAL_WINGS)
def test_without_a_wing_its_commands_name_it_and_the_others_work(wing: str, tmp_path: Path) -> None:
    environment = product_without(wing, tmp_path)
    assert run(environment, "--help").returncode == 0
    for command in COMMANDS_OF_WINGS[wing]:
        done = run(environment, command, "--help")
        assert done.returncode != 0
        assert done.stderr.startswith(f"sm-train: sm_train.toolkit.{wing}: is not installed")
    for command in COMMANDS.keys() - COMMANDS_OF_WINGS[wing]:
        done = run(environment, command, "--help")
        assert done.returncode == 0, done.stderr
    run_file = write_run(tmp_path)
    cost = run(environment, "cost", run_file, "--json")
    assert json.loads(cost.stdout)["total"]["cost_usd"] > 0, cost.stderr
    actual = run(environment, "cost", run_file, "--actual")
    assert ("sm_train.toolkit.analysis: is not installed" in actual.stderr) == (wing == "analysis")
    check = run(environment, "check", run_file, "--offline", "--json")
    assert isinstance(json.loads(check.stdout), dict | list), check.stderr


def test_without_the_analysis_watch_restarts_no_job_for_its_log(aws: Aws, tmp_path: Path) -> None:
    """With it, this failure of a GPU is worth another job (tests/toolkit/runs)."""
    environment = product_without("analysis", tmp_path)

    def cli(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        return run(environment | options["env"], *arguments)

    laptop = Laptop(cli, aws, tmp_path)
    reason = "AlgorithmError: ExecuteUserScriptError: ExitCode 1"
    laptop.sagemaker.set_status(FIRST, "Failed", reason=reason, ended_ago=3600)
    laptop.sagemaker.log_event(FIRST, "step", ago=3700, step=10)
    lost = "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    laptop.aws.client("logs").put_log_events(
        logGroupName="/aws/sagemaker/TrainingJobs",
        logStreamName=f"{FIRST}/algo-1-1",
        logEvents=[{"timestamp": int((time.time() - 3650) * 1000), "message": lost}],
    )
    watched = laptop.json("watch", "demo", "--once", code=ExitCode.JOB_FAILED)
    assert watched["action"] == "end"
    assert f"{reason} (its log: not read, the analysis of logs is not installed)" in str(watched)


def test_the_python_api_names_a_missing_wing(tmp_path: Path) -> None:
    environment = product_without("data_prep", tmp_path)
    program = _PROGRAM.partition("from sm_train")[0] + "import sm_train; sm_train.pack"
    failed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Error: sm_train.toolkit.data_prep: is not installed" in failed.stderr


def test_a_wing_of_which_only_caches_are_left_is_missing(tmp_path: Path) -> None:
    environment = product_without("clusters", tmp_path)
    (tmp_path / "product" / PACKAGE / "toolkit" / "clusters" / "__pycache__").mkdir(parents=True)
    refused = run(environment, "status", tmp_path)
    assert refused.stderr.startswith(
        "warning: sm_train.toolkit.clusters: is not installed (runs on Kubernetes and Slurm); its "
        "runs are not found\n"
    )

"""Rules of docs/security.md that hold for all code of the product, by reading it."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.run_documents import config

ROOT = Path(__file__).parents[1]
PACKAGES = ("cost", "entrypoints", "estimators", "toolkit")

NO_WEIGHTS = {"config_class", "AutoTokenizer"}
"""Classes whose ``from_pretrained`` reads no weights."""


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Return file, name of the function and call, of all calls in the product."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
            name = path.relative_to(ROOT).as_posix()
            found += [(name, ast.unparse(node.func), node) for node in nodes]
    return found


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


def test_torch_loads_weights_only() -> None:
    loads = [(file, keywords(call)) for file, name, call in calls() if name == "torch.load"]
    assert {file for file, _ in loads} == {"entrypoints/script/checkpointer.py"}
    assert [given.get("weights_only") for _, given in loads] == ["True"] * len(loads)
    pickles = {file for file, name, _ in calls() if re.match(r"(pickle|dill|joblib)\.load", name)}
    # Between processes of one machine, or sealed with the key of the job; never from a file.
    assert pickles == {
        "entrypoints/images/decoder_pool.py",
        "entrypoints/distributed/object_exchange.py",
    }


def test_models_are_loaded_from_safetensors_and_run_no_code() -> None:
    assert [file for file, _, call in calls() if "trust_remote_code" in keywords(call)] == []
    loads = [
        (file, keywords(call))
        for file, name, call in calls()
        if name.endswith(".from_pretrained") and name.split(".")[-2] not in NO_WEIGHTS
    ]
    assert {file for file, _ in loads} == {
        "entrypoints/models/builder.py",
        "entrypoints/models/model_folders.py",
    }
    for file, given in loads:
        if None in given:  # **options
            options = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(
                r'options = \{\} if config == "scheduler_config.json" else '
                r'\{"use_safetensors": True\}',
                options,
            )
        else:
            assert given.get("use_safetensors") == "True", file


FIXED = {"torch": "2.10", "transformers": "5.3"}
"""Package → first version without the vulnerabilities that setup.cfg names."""


def requirements() -> Iterator[Requirement]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = [parser["options"].get("install_requires", "")]
    lines += parser["options.extras_require"].values()
    for line in "\n".join(lines).splitlines():
        if line.strip() and not line.strip().startswith(("#", "sm-train")):
            yield Requirement(line.split(" #")[0])


def test_packages_of_the_laptop_are_newer_than_their_vulnerabilities() -> None:
    floors: dict[str, list[str]] = {name: [] for name in FIXED}
    for requirement in requirements():
        if requirement.name in FIXED:
            floors[requirement.name] += [
                spec.version for spec in requirement.specifier if spec.operator == ">="
            ]
            assert any(spec.operator == ">=" for spec in requirement.specifier), requirement
    for name, fixed in FIXED.items():
        assert floors[name]
        assert min(map(Version, floors[name])) >= Version(fixed)


@pytest.fixture
def pip_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace pip of child processes by a program that writes its arguments to a file."""
    package = tmp_path / "modules" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    written = tmp_path / "arguments.json"
    (package / "__main__.py").write_text(
        f"import json, sys\nwith open({str(written)!r}, 'w') as file: json.dump(sys.argv, file)"
    )
    paths = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    return written


def test_a_node_installs_packages_with_hashes(tmp_path: Path, pip_arguments: Path) -> None:
    from sm_train.entrypoints.base.pip_install import install_job_packages

    (tmp_path / "requirements.txt").touch()
    install_job_packages(tmp_path)
    arguments = json.loads(pip_arguments.read_text())
    assert arguments[-3:] == ["--require-hashes", "-r", "requirements.txt"]


def test_trackers_are_installed_with_hashes(
    tmp_path: Path, pip_arguments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm_train.entrypoints.tracking import packages

    (tmp_path / packages.tracker_requirements("wandb")).touch()
    monkeypatch.setattr(packages, "import_names", lambda tracker: ["no_such_module_1"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    packages.ensure_packages(SimpleNamespace(name="wandb"), tmp_path)  # type: ignore[arg-type]
    assert "--require-hashes" in json.loads(pip_arguments.read_text())


def test_every_command_that_installs_packages_requires_hashes() -> None:
    """The user's own requirements have none; they are installed after the others."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in (".py", ".sh", ".Dockerfile", ".yaml") and path.is_file():
                text = path.read_text(encoding="utf-8")
                for match in re.finditer(r"pip3? install --?(?:q|no-cache-dir)\b.*", text):
                    if not re.search("--require-hashes|USER_REQUIREMENTS", match[0]):
                        found.append(f"{path.relative_to(ROOT)}: {match[0]}")
    assert found == []


def test_the_page_of_a_comparison_runs_its_own_script_only() -> None:
    from PIL import Image
    from sm_train.toolkit.models.sampling.comparison_page import comparison_page

    image = Image.new("RGB", (8, 8))
    page = comparison_page(("a", "b"), ["</script><script>x"], ([image], [image]), 0)
    # The data and the program; the prompt is text in the data.
    assert page.count("<script") == page.count("</script") == 2
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none'; ")
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]+';", policy)


def test_every_page_starts_with_a_policy() -> None:
    """A page that an option writes is opened from disk, where it may read other files."""
    starts = []
    for path in sorted((ROOT / "toolkit").rglob("*")):
        if path.suffix in (".py", ".html"):
            text = path.read_text(encoding="utf-8")
            starts += re.findall(r"(?i)<!doctype html>.*?<(?:title|style|script|body)", text, re.S)
    assert len(starts) >= 3
    assert [start for start in starts if "Content-Security-Policy" not in start] == []


def test_the_conditions_of_the_policies() -> None:
    from sm_train.estimators.request.iam import policies

    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.13"
    documents = policies(config(), "us-east-1", image)
    for name in ("laptop", "watch"):
        statements = documents[name]["Statement"]
        [passes] = [statement for statement in statements if "iam:PassRole" in statement["Action"]]
        to_sagemaker = {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
        assert dict(passes)["Condition"] == to_sagemaker
    [trust] = documents["trust"]["Statement"]
    own = {"StringEquals": {"aws:SourceAccount": "210987654321"}}
    assert dict(trust)["Condition"] == own


def test_policies_reach_alarms_and_metrics_of_sm_train_only() -> None:
    from sm_train.estimators.request.iam import policies

    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.13"
    documents = policies(config(), "us-east-1", image)
    by_id = {document["Sid"]: dict(document) for document in documents["laptop"]["Statement"]}
    alarms = "arn:aws:cloudwatch:us-east-1:210987654321:alarm:"
    [allowed] = by_id["ManageAlarms"]["Resource"]
    assert allowed.startswith(f"{alarms}sm-train")
    assert config().name in allowed
    by_id = {document["Sid"]: dict(document) for document in documents["job"]["Statement"]}
    own = {"StringEquals": {"cloudwatch:namespace": "/aws/sagemaker/TrainingJobs"}}
    assert by_id["PutMetrics"]["Condition"] == own


def test_queues_are_encrypted() -> None:
    template = (ROOT / "toolkit" / "templates" / "pack-lambda.yaml").read_text(encoding="utf-8")
    queues = template.count("Type: AWS::SQS::Queue\n")
    assert queues == template.count("SqsManagedSseEnabled: true") > 0


def test_messages_and_results_lose_terminal_control(capsys: pytest.CaptureFixture[str]) -> None:
    from sm_train.toolkit.terminal.console import note, write_line

    note("a\x1b]0;title\x07b")
    write_line("c\x9b31md")
    write_line("e\u202ef", err=True)
    assert capsys.readouterr() == ("cd\n", "ab\nef\n")

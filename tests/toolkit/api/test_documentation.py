"""The Python API's page and notebook run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import sm_train
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.schema import RunConfig

from tests.conftest import Aws, Cli, clean_environment
from tests.support.capabilities import link_optional_package
from tests.support.cluster.training_jobs import create_nodes, run_nodes, tiny_run, write_shards
from tests.support.deadline import DEADLINE
from tests.support.image_files import write_album
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.run_documents import run, stage
from tests.toolkit.api.run_support import account  # noqa: F401

DOCS = Path(__file__).parents[3] / "docs"


def outputs(notebook: Any) -> str:
    """Return all that the cells have shown, as text and HTML."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown.append(output.get("text", ""))
            shown += [str(value) for value in output.get("data", {}).values()]
    return "\n".join(shown)


@pytest.mark.integration
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that raises fails the test; AWS is not needed."""
    import nbformat
    from nbclient import NotebookClient

    for name in set(os.environ) - set(clean_environment(tmp_path)):
        monkeypatch.delenv(name)
    for name, value in clean_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    # `!sm-train` is that of this environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    notebook = nbformat.read(DOCS / "examples" / "python-api.ipynb", as_version=4)
    client = NotebookClient(
        notebook,
        timeout=DEADLINE,
        startup_timeout=DEADLINE,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    shown = outputs(notebook)
    for expected in ("throughput-unmeasured", "P10 to P90", "1024px", "TrainingJobName", "rank 3"):
        assert expected in shown or expected in str(notebook.cells)
    assert "<table>" in shown
    assert "it has 256px, 512px, 1024px" in shown


_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```)?", re.M | re.S)

MODEL = "local-runs/NAME/STAGE/nodes/algo-1/model"


def _store_model(folder: Path, preset: str) -> Path:
    from tests.support.models import build, save

    folder.parent.mkdir(parents=True, exist_ok=True)
    return save(build(preset), folder.parent / f"{folder.name}-files").rename(folder)


def _base_and_adapter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """diffusers opens a folder of the current one before it asks the Hub for the same name."""
    from tests.entrypoints.models.lora_support import run_folder, train

    packages = folder / "packages"
    packages.mkdir()
    link_optional_package("peft", packages)
    monkeypatch.syspath_prepend(packages)
    base = _store_model(folder / "stabilityai" / "stable-diffusion-xl-base-1.0", "tiny-sdxl")
    (folder / "run").mkdir()
    run = run_folder(train("tiny-sdxl", base), base, folder / "run")
    (folder / MODEL).parent.mkdir(parents=True)
    (run / "final").rename(folder / MODEL)
    return {"PYTHONPATH": str(packages)}


def _final_model(folder: Path, _: pytest.MonkeyPatch) -> dict[str, str]:
    _store_model(folder / MODEL, "tiny-sd2")
    return {}


def _photos_and_model(folder: Path, _: pytest.MonkeyPatch) -> dict[str, str]:
    write_album(folder / "photos", 6)
    _store_model(folder / "local-runs" / "demo" / "32px" / "model", "tiny-sd2")
    return {}


PREPARED: dict[tuple[str, int], Callable[[Path, pytest.MonkeyPatch], dict[str, str]]] = {
    ("models.md", 0): _base_and_adapter,
    ("models.md", 2): _final_model,
    ("python-api.md", 4): _photos_and_model,
}
"""What a block finds in its folder besides a run file, and the environment that it needs."""

RUN_ELSEWHERE = {
    # A training job in SageMaker, and a process of a training job: the tests below.
    ("python-api.md", 3),
    ("jobs.md", 0),
    # For version 2 of the SDK, which cannot be installed together with version 3: compiled only.
    ("migration/sagemaker-sdk-v2.md", 0),
}


def python_blocks() -> list[tuple[str, int, str, str]]:
    """Return page, number, code and output of every Python block of the documentation."""
    return [
        (page.relative_to(DOCS).as_posix(), number, code, shown)
        for page in sorted(DOCS.rglob("*.md"))
        for number, (code, shown) in enumerate(_BLOCK.findall(page.read_text()))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number", "code", "shown"),
    [block for block in python_blocks() if block[:2] not in RUN_ELSEWHERE],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".md") else "",
)
def test_block_runs_as_a_file(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page: str,
    number: int,
    code: str,
    shown: str,
) -> None:
    """What it prints is below it."""
    assert cli("init", "run.yaml", "--preset", "bria-2.0").returncode == 0
    environment = PREPARED.get((page, number), lambda *_: {})(tmp_path, monkeypatch)
    script = tmp_path / "block.py"
    script.write_text(code)
    done = run_script(script, environment)
    assert done.returncode == 0, done.stderr
    if shown:
        assert done.stdout == shown


def test_every_other_block_is_known_and_compiles() -> None:
    blocks = {block[:2]: block[2] for block in python_blocks()}
    assert blocks.keys() >= RUN_ELSEWHERE | PREPARED.keys()
    for name in RUN_ELSEWHERE:
        compile(blocks[name], "/".join(map(str, name)), "exec")


def block_of(page: str, number: int) -> str:
    [code] = [block[2] for block in python_blocks() if block[:2] == (page, number)]
    return code


@pytest.mark.integration
def test_status_and_metrics_of_a_job_as_documented(
    account: Aws,  # noqa: F811
    tmp_path: Path,
) -> None:
    fake = FakeSageMaker(account)
    job = sm_train.Run.from_dict(run(name="bria-2-0", stages=[stage()])).submit()
    assert job.name == "bria-2-0--256px-0001"
    for step in (100, 200):
        fake.log_event(job.name, "step", stage="256px", step=step, loss=0.5, steps_per_second=2.0)
    script = tmp_path / "block.py"
    script.write_text(block_of("python-api.md", 3))
    done = run_script(script, {**account.environment, "MPLBACKEND": "agg"})
    assert done.returncode == 0, done.stderr
    assert "training" in done.stdout


@pytest.mark.integration
def test_loop_of_the_page_trains_in_a_job(tmp_path: Path) -> None:
    entry = {"entry": "loop.py", "code": ".", "data": {"uri": "s3://own/shards/"}}
    config = tiny_run(max_steps=12, checkpoint_every=5).model_dump(mode="json") | entry
    code = UserCode({"loop.py": block_of("jobs.md", 0).encode()})
    [node] = create_nodes(tmp_path, RunConfig.model_validate(config), 1, code)
    write_shards(node.train_channel, shards=1, each=40)
    events = run_nodes([node], 1)
    assert [event["step"] for event in events if event["kind"] == "step"][-1] == 12
    assert (node.checkpoints / "step-00000010").is_dir()


def run_script(
    script: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script],
        cwd=script.parent,
        env=clean_environment(script.parent) | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.slow
def test_pack_runs_in_a_script_as_documented(tmp_path: Path) -> None:
    """Without a main guard: a worker process does not run the script again."""
    page = (DOCS / "python-api.md").read_text()
    [block] = [code for code, _ in _BLOCK.findall(page) if "pack(" in code]
    [call] = [line for line in block.splitlines() if "sm_train.pack(" in line]
    write_album(tmp_path / "photos", 6)
    script = tmp_path / "prepare.py"
    script.write_text(f"import sm_train\nprint('once')\n{call}\n")
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("once") == 1
    assert [*tmp_path.rglob("index.parquet")]


def test_page_names_every_error_and_result() -> None:
    page = (DOCS / "python-api.md").read_text()
    internal = {"Checkpointer", "CurrentJob", "EventLog", "Heartbeat", "__version__", "current_job"}
    named = [name for name in sm_train.__all__ if f"`{name}" in page or f"sm_train.{name}" in page]
    assert set(sm_train.__all__) - set(named) - internal == {"PackResult"}


def test_public_methods_document_arguments_and_errors() -> None:
    """The reference is generated from the docstrings."""
    for owner in (sm_train.Run, sm_train.Job):
        for name, member in vars(owner).items():
            if name.startswith("_") or not callable(getattr(owner, name)):
                continue
            text = (member.__func__ if isinstance(member, classmethod) else member).__doc__
            assert text, f"{owner.__name__}.{name}"

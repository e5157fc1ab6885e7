"""The Python API's page and notebook run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sm_train

from tests.conftest import Cli, clean_environment
from tests.support.deadline import DEADLINE
from tests.support.image_files import write_album

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

NOT_RUN = {
    # Code for version 2 of the SDK, which cannot be installed with version 3.
    ("migration/sagemaker-sdk-v2.md", 0),
    # Weights of the Hub, and of a trained run: tests/entrypoints/models loads such folders.
    ("models.md", 0),
    ("models.md", 2),
    # An excerpt of docs/examples/own_loop.py, which tests/entrypoints/script runs.
    ("jobs.md", 0),
    # A job in AWS, and a trained model.
    ("python-api.md", 3),
    ("python-api.md", 4),
}
"""Pages with the numbers of blocks that need more than a folder; everything else runs."""


def python_blocks() -> list[tuple[str, int, str, str]]:
    """Return page, number, code and output of every Python block of the documentation."""
    return [
        (page.relative_to(DOCS).as_posix(), number, code, shown)
        for page in sorted(DOCS.rglob("*.md"))
        for number, (code, shown) in enumerate(_BLOCK.findall(page.read_text()))
    ]


@pytest.mark.parametrize(
    ("page", "number", "code", "shown"),
    [block for block in python_blocks() if block[:2] not in NOT_RUN],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".md") else "",
)
def test_block_runs_as_a_file(
    cli: Cli, tmp_path: Path, page: str, number: int, code: str, shown: str
) -> None:
    """What it prints is below it."""
    assert cli("init", "run.yaml", "--preset", "bria-2.0").returncode == 0
    script = tmp_path / "block.py"
    script.write_text(code)
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    if shown:
        assert done.stdout == shown


def test_exceptions_are_blocks() -> None:
    assert {block[:2] for block in python_blocks()} >= NOT_RUN


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script],
        cwd=script.parent,
        env=clean_environment(script.parent),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


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

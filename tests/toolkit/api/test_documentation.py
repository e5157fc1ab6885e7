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


def test_page_runs(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every block that needs neither AWS nor a GPU; what it prints is below it."""
    assert cli("init", "run.yaml", "--preset", "bria-2.0").returncode == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    page = (DOCS / "python-api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```)?", page, re.M | re.S)
    offline = [
        (code, shown) for code, shown in blocks if "Job(" not in code and "pack(" not in code
    ]
    assert len(offline) >= 4
    for code, shown in offline:
        exec(compile(code, "python-api.md", "exec"), {})
        printed = capsys.readouterr().out
        if shown:
            assert printed == shown


def test_pack_runs_in_a_script_as_documented(tmp_path: Path) -> None:
    """Without a main guard: a worker process does not run the script again."""
    page = (DOCS / "python-api.md").read_text()
    [block] = [
        code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "pack(" in code
    ]
    [call] = [line for line in block.splitlines() if "sm_train.pack(" in line]
    write_album(tmp_path / "photos", 6)
    script = tmp_path / "prepare.py"
    script.write_text(f"import sm_train\nprint('once')\n{call}\n")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
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

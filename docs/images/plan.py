"""Write plan.svg: the plan of the bria-2.0 preset as `submit --dry-run` shows it (`make docs`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100
COMMAND = "sm-train submit run.yaml --dry-run"


def run(*arguments: str, cwd: Path) -> str:
    """Run a command; return what it prints on standard output, with colors."""
    program = [sys.executable, "-m", "sm_train.toolkit", *arguments]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    result = subprocess.run(
        program, cwd=cwd, env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run("init", "run.yaml", "--preset", "bria-2.0", cwd=Path(folder))
        plan = run("submit", "run.yaml", "--dry-run", cwd=Path(folder))
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text(f"$ {COMMAND}", style="bold"))
        console.print(Text.from_ansi(plan.rstrip()))
    svg = console.export_svg(title="sm-train", unique_id="plan")
    # The fonts that rich links to would be fetched from another site: use the reader's own.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    Path(__file__).with_name("plan.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()

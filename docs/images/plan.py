"""Write plan.svg: the plan of a filled-in run as `submit --dry-run` shows it (`make docs`).

The account, the bucket and the it/s of the two later stages are examples.
"""

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
ACCOUNT = ("--role", "arn:aws:iam::210987654321:role/sm-train", "--bucket", "photos-training")
VALUES = {
    "model.components": "s3://photos-training/models/sd2/",
    "data.samples": "300000000",
    "stages.512px.steps_per_second": "1.06",
    "stages.1024px.steps_per_second": "0.52",
    "budget.usd": "140000",
}


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
        data = ("--data", "s3://photos-training/shards/")
        run("init", "run.yaml", "--preset", "bria-2.0", *ACCOUNT, *data, cwd=Path(folder))
        changes = (f"--set={key}={value}" for key, value in VALUES.items())
        plan = run("submit", "run.yaml", "--dry-run", *changes, cwd=Path(folder))
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

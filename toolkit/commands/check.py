"""``sm-train check``: finds what would go wrong before money is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.errors import ExitCode, UserError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--offline", is_flag=True, help="Leave out what only AWS can say.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(options: dict[str, Any], run: Path, offline: bool, as_json: bool) -> int:
    """Look through RUN for errors and waste; exit 3 if there is an error."""
    from sm_train.estimators.run_file import RunFileError, load_run
    from sm_train.toolkit import aws
    from sm_train.toolkit.output import people, write_json
    from sm_train.toolkit.preflight import offline_findings, online_findings
    from sm_train.toolkit.submission import price

    try:
        config = load_run(run)
    except RunFileError as error:
        raise UserError(str(error)) from None
    region = aws.resolve_region(options["region"], config.region, options["profile"])
    costs = price(config, region)
    findings = list(offline_findings(config, costs, run.parent))
    if not offline:
        findings += online_findings(config, region, options["profile"])
    ok = not any(finding.level == "error" for finding in findings)
    if as_json:
        write_json({"ok": ok, "findings": [finding.as_dict() for finding in findings]})
    else:
        console = people()
        for finding in findings:
            console.print(
                f"{finding.level:<8} {finding.code:<18} {finding.where}: {finding.message}; "
                f"{finding.fix}",
                markup=False,
            )
        console.print("ok" if ok else "not ok: errors above would cost a job")
    return ExitCode.OK if ok else ExitCode.PREFLIGHT

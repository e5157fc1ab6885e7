"""``sm-train schema``: the run file's JSON Schema, for editors."""

from __future__ import annotations

import click


@click.command()
def command() -> None:
    """Print the run file's JSON Schema.

    In VS Code (YAML extension) the first line of a run file may name it:
    # yaml-language-server: $schema=run.schema.json
    """
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.terminal.console import write_json

    schema = RunConfig.model_json_schema()
    write_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})

"""``sm-train schema``: the JSON Schema of run files, for editors."""

from __future__ import annotations

from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train schema > run.schema.json",
    prints_json=False,
)
def command() -> None:
    """Print the JSON Schema of run files.

    VS Code (YAML extension) uses it if the first line of a run file is
    # yaml-language-server: $schema=run.schema.json
    """
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.terminal.console import write_json

    schema = RunConfig.model_json_schema()
    write_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})

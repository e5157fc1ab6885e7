"""The reference of the run file, from its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from tables import code, row, table

HEAD = """\
# Run file

Every key, from the JSON Schema that `sm-train schema` prints. Unknown keys are errors. `sm-train
init` writes a
commented file; [Models](../models.md), [Data](../data.md) and [Jobs](../jobs.md) describe what the
keys do.

VS Code's YAML extension completes and checks the keys if the first line of the run file is
`# yaml-language-server: $schema=run.schema.json`:

```
sm-train schema > run.schema.json
```
"""


def render() -> str:
    """Return the page: a table of the top level, then one of each section."""
    schema = RunConfig.model_json_schema()
    sections = list(_sections(schema, "", schema))
    parts = [HEAD, "\n## Top level\n\n", _table(schema, schema, "")]
    for path, section in sections:
        parts += [f"\n## {path}\n\n", section.get("description", "") + "\n\n"]
        parts.append(_table(section, schema, path))
    return "".join(parts)


def _sections(section: dict[str, Any], path: str, schema: dict[str, Any]) -> Iterator[Any]:
    for name, value in section["properties"].items():
        kind, suffix = _section_of(value, schema)
        if kind is not None:
            inner = f"{path}.{name}{suffix}".lstrip(".")
            yield inner, kind
            yield from _sections(kind, inner, schema)


def _section_of(value: dict[str, Any], schema: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return the section that a key holds, and how the path continues: ``[]`` for lists."""
    for variant in _variants(value):
        if "$ref" in variant:
            found = schema["$defs"][variant["$ref"].rpartition("/")[2]]
            return (found, "") if "properties" in found else (None, "")
        if "$ref" in (items := variant.get("items", {})):
            return schema["$defs"][items["$ref"].rpartition("/")[2]], "[]"
        inner = _map_values(variant)
        if inner is not None:
            found, suffix = _section_of(inner, schema)
            return found, f".NAME{suffix}" if found else ""
    return None, ""


def _variants(value: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = value.get("anyOf") or value.get("oneOf") or [value]
    return found


def _map_values(value: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of a map's values, which may depend on a pattern of its keys."""
    found = next(iter(value.get("patternProperties", {}).values()), None)
    found = found or value.get("additionalProperties")
    return found if isinstance(found, dict) else None


def _table(section: dict[str, Any], schema: dict[str, Any], path: str) -> str:
    required = set(section.get("required", ()))
    rows = []
    for name, value in section["properties"].items():
        kind, suffix = _section_of(value, schema)
        inner = f"{path}.{name}{suffix}".lstrip(".")
        anchor = inner.lower().replace(".", "").replace("[]", "")
        shown = f"[section](#{anchor})" if kind else _type(value, schema)
        default = "**required**" if name in required else _default(value)
        rows.append(row(code(name), shown, default, value.get("description", "")))
    return table(("key", "type", "default", "description"), rows)


def _default(value: dict[str, Any]) -> str:
    if "default" not in value or value["default"] is None:
        return "–"
    return code(json.dumps(value["default"], ensure_ascii=False))


def _type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a key's type and bounds in words."""
    variants = _variants(value)
    if variants != [value]:
        kinds = [_type(variant, schema) for variant in variants if variant.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in value:
        return _type(schema["$defs"][value["$ref"].rpartition("/")[2]], schema)
    if "enum" in value:
        return ", ".join(code(choice) for choice in value["enum"])
    if "const" in value:
        return code(value["const"])
    kind = value.get("type", "any")
    if kind == "array":
        return f"list of {_type(value.get('items', {}), schema)}"
    if kind == "object":
        inner = _map_values(value)
        return f"map of {_type(inner, schema)}" if inner else "map"
    return kind + _bounds(value)


def _bounds(value: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {value[key]:g}" for key, sign in signs.items() if key in value]
    return f", {', '.join(found)}" if found else ""

"""Load a run file and report every mistake in it at once, one line each.

A line reads ``FILE:LINE: dotted.path: value: what is allowed``.
"""

from __future__ import annotations

import copy
import datetime
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from sm_train.cost.instances import UnknownInstanceTypeError, instance_type
from sm_train.estimators.config.cluster import ClusterSection
from sm_train.estimators.config.consistency import (
    KeyPath,
    Problem,
    RunParts,
    cross_section_problems,
)
from sm_train.estimators.config.data import ChannelSection, DataSection
from sm_train.estimators.config.fields import SECRET_KEY_PATTERN, SECRET_PATTERN, pattern_message
from sm_train.estimators.config.model import ModelSection
from sm_train.estimators.config.placement import fallback_problems
from sm_train.estimators.config.preset_file import (
    PresetFileError,
    is_preset_file,
    read_preset_file,
)
from sm_train.estimators.config.presets import preset_names
from sm_train.estimators.config.recovery import RecoverySection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.config.training import TrainingSection
from sm_train.estimators.config.yaml_limits import MAX_BYTES, YamlLimitError, check_limits
from sm_train.estimators.secrets.secret_scan import (
    find_known_format,
    find_secret,
    find_secret_in_setting,
)

# libyaml's parser, if PyYAML was built with it: several times as fast, with the same line numbers.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NOT_SHOWN = "(not shown)"
_MAX_SHOWN = 80
"""Characters of a value that an error message shows."""


class RunFileError(ValueError):
    """The run file cannot be used; the message has one line for each mistake.

    ``problems`` are the same mistakes; it is empty if the file could not be parsed.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate a run file, after applying ``overrides`` (``a.b=c``).

    Raises:
        RunFileError: the file is missing, is not YAML or breaks the schema, or the path of an
            override does not exist.
    """
    text = _read_text(path)
    root, raw = _parse_yaml(path, text)
    if not isinstance(raw, dict):
        raise RunFileError(f"{path}:1: a run file is a mapping of keys; `sm-train init` writes one")
    _apply_overrides(overrides, raw)
    problems = _duplicate_keys(root, ()) + _read_preset(path.parent, raw)
    problems += _find_problems(raw)
    if problems:
        lines = dict(_key_lines(root, ()))
        problems.sort(key=lambda problem: _line_number(problem.path, lines))
        raise _error(path, lines, problems, raw)
    return RunConfig.model_validate(raw)


def _read_preset(base: Path, raw: dict[Any, Any]) -> list[Problem]:
    """Add the content of a custom preset's file to the run file's ``model``."""
    model = raw.get("model")
    preset = model.get("preset") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(preset, str) or not is_preset_file(preset):
        return []
    try:
        model["preset_content"] = read_preset_file(base / preset)
    except PresetFileError as error:
        # The schema's check would only repeat it: let it see a valid model.
        raw["model"] = {"preset": preset_names()[0]}
        return [Problem(("model", "preset"), preset, str(error))]
    return []


def load_document(document: dict[str, Any], overrides: Sequence[str], source: str) -> RunConfig:
    """Validate the run file of an earlier job, after applying ``overrides``.

    Error messages name ``source`` in place of a file.

    Raises:
        RunFileError: the document breaks the schema, or the path of an override does not exist.
    """
    document = copy.deepcopy(document)
    _apply_overrides(overrides, document)
    problems = _find_problems(document)
    if problems:
        raise _error(Path(source), {}, problems, document)
    return RunConfig.model_validate(document)


def _error(
    file: Path, lines: dict[KeyPath, int], problems: Sequence[Problem], raw: Any
) -> RunFileError:
    """Return the error with one line for each problem, and without the credentials in ``raw``."""
    secrets = {text for text in _texts(raw) if find_secret(text)}
    hidden = [_hide(problem, secrets) for problem in problems]
    message = "\n".join(
        _format_problem(f"{file}:{_line_number(problem.path, lines)}", hidden_problem)
        for problem, hidden_problem in zip(problems, hidden, strict=True)
    )
    return RunFileError(message, hidden)


def _texts(value: Any) -> Iterator[str]:
    """Yield all keys and values of a document that are text."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (*_texts(key), *_texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _hide(problem: Problem, secrets: set[str]) -> Problem:
    """Return the problem without ``secrets``: users print, log and send what it says."""
    message = problem.message
    for secret in secrets:
        message = message.replace(repr(secret), _NOT_SHOWN).replace(secret, _NOT_SHOWN)
    path = tuple(_NOT_SHOWN if key in secrets else key for key in problem.path)
    is_secret = any(secret in str(problem.value) for secret in secrets)
    return Problem(path, None if is_secret else problem.value, message)


def _apply_overrides(overrides: Sequence[str], raw: dict[Any, Any]) -> None:
    """Apply ``overrides``; a speed that the file states stays that of the file's own cluster."""
    before = _stated_speeds(raw)
    for override in overrides:
        _apply_override(override, raw)
    after = _stated_speeds(raw)
    for name, (speed, cluster) in before.items():
        is_moved = name in after and after[name][0] == speed and after[name][1] != cluster
        if is_moved and None not in cluster.values():
            stage = next(candidate for candidate in raw["stages"] if _name_of(candidate) == name)
            stage["measured_on"] = cluster


def _stated_speeds(raw: dict[Any, Any]) -> dict[Any, tuple[Any, dict[str, Any]]]:
    """Return each stage's stated speed and the cluster of the file, by the stage's name.

    A stage that names the cluster itself is left out, and so is what is no valid stage.
    """
    cluster, stages = raw.get("cluster"), raw.get("stages")
    kind = cluster.get("instance_type") if isinstance(cluster, dict) else None
    return {
        stage["name"]: (
            stage["steps_per_second"],
            {
                "instance_type": kind,
                "instances": stage.get("instances"),
                "per_device_batch_size": stage.get("per_device_batch_size"),
                "gradient_accumulation_steps": stage.get("gradient_accumulation_steps", 1),
            },
        )
        for stage in (stages if isinstance(stages, list) else ())
        if isinstance(_name_of(stage), str)
        and stage.get("steps_per_second")
        and not stage.get("measured_on")
    }


def _name_of(stage: Any) -> Any:
    return stage.get("name") if isinstance(stage, dict) else None


def _apply_override(override: str, raw: dict[Any, Any]) -> None:
    """Set one value, as in ``stages.256px.instances=8``; a stage is named or indexed from 0."""
    path, separator, text = override.partition("=")
    keys = re.findall(r"[^.\[\]]+", path)
    if not separator or not keys:
        raise RunFileError(f"--set: {_shown(override)}: write it as a.b=value")
    try:
        check_limits(text, _Loader)
        value = yaml.load(text, _Loader)
    except YamlLimitError as error:
        raise RunFileError(f"--set: {path}: {error}") from None
    except (yaml.YAMLError, ValueError):
        raise RunFileError(f"--set: {path}: the value is not YAML; quote it") from None
    parent: Any = raw
    for key in keys[:-1]:
        if isinstance(parent, dict):
            parent = parent.setdefault(key, {})
        else:
            parent = _list_item(parent, key, path)
    if isinstance(parent, dict):
        parent[keys[-1]] = value
    elif isinstance(parent, list) and keys[-1].isdigit() and int(keys[-1]) < len(parent):
        parent[int(keys[-1])] = value
    else:
        raise RunFileError(f"--set: {path}: {keys[-1]} does not exist")


def _list_item(items: Any, key: str, path: str) -> Any:
    """Return the item of a list that has the index or the ``name`` ``key``."""
    if isinstance(items, list):
        if key.isdigit() and int(key) < len(items):
            return items[int(key)]
        for item in items:
            if isinstance(item, dict) and item.get("name") == key:
                return item
    raise RunFileError(f"--set: {path}: {key} does not exist")


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)  # at most: the path may be a device
    except FileNotFoundError:
        raise RunFileError(f"{path}: no such file; `sm-train init {path}` writes one") from None
    except IsADirectoryError:
        raise RunFileError(f"{path}: is a folder; name the run file in it") from None
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        limit = MAX_BYTES // 2**20
        raise RunFileError(f"{path}: more than {limit} MiB; a run file is a few kilobytes of YAML")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RunFileError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _parse_yaml(path: Path, text: str) -> tuple[yaml.Node | None, Any]:
    """Return the node tree, which has line numbers, and the values."""
    loader = _Loader(text)
    try:
        check_limits(text, _Loader)
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    except YamlLimitError as error:
        raise RunFileError(f"{path}:{error.line}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        number = mark.line + 1 if mark else 1
        lines = text.splitlines()
        if number <= len(lines) and "\t" in lines[number - 1]:
            raise RunFileError(f"{path}:{number}: a tab; YAML indents with spaces") from None
        raise RunFileError(f"{path}:{number}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise RunFileError(f"{path}:1: not YAML: {first}") from None
    finally:
        loader.dispose()


def _key_lines(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    """Yield every path of the document with the line of its key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, key.value)
            yield inner, key.start_mark.line + 1
            yield from _key_lines(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            inner = (*path, index)
            yield inner, item.start_mark.line + 1
            yield from _key_lines(item, inner)


def _duplicate_keys(node: yaml.Node | None, path: KeyPath) -> list[Problem]:
    """Find repeated keys, of which YAML silently keeps the last."""
    problems: list[Problem] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                problems.append(Problem((*path, key.value), None, "appears twice; keep one"))
            seen.add(key.value)
            problems += _duplicate_keys(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            problems += _duplicate_keys(item, (*path, index))
    return problems


def _find_problems(raw: dict[Any, Any]) -> list[Problem]:
    """Find all mistakes in two passes.

    Pydantic runs a section's own check only if all its fields are valid, and the root's only if all
    sections are. So the second pass validates a copy without the values that failed in the first.
    """
    errors = _validation_errors(RunConfig, raw)
    secrets = list(_find_secrets(raw, ()))
    if not errors:
        return [*_find_fallback_problems(raw), *secrets]
    pruned = _without(raw, [error["loc"] for error in errors])
    # What the first pass removed is missing in the second.
    later = [error for error in _validation_errors(RunConfig, pruned) if error["type"] != "missing"]
    # Errors without a location are the root's cross-section check, which is repeated below on the
    # valid sections to get a path for each problem.
    problems = [_problem(raw, error) for error in (*errors, *later) if error["loc"]]
    is_model_invalid = any(problem.path[:1] == ("model",) for problem in problems)
    cross = [
        problem
        for problem in _find_cross_section_problems(pruned)
        # The preset was removed above.
        if not (is_model_invalid and problem.path == ("model", "preset"))
    ]
    return list(dict.fromkeys((*problems, *cross, *secrets)))


def _find_secrets(value: Any, path: KeyPath) -> Iterator[Problem]:
    """Find values that look like credentials: they would end up in console, logs and bundle."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str) and (kind := find_secret(key)):
                yield Problem((*path, key), None, f"looks like {kind}; remove it from the file")
            yield from _find_secrets(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_secrets(item, (*path, index))
    elif isinstance(value, str) and (kind := _find_secret(path, value)):
        yield Problem(
            path,
            None,
            f"looks like {kind}, visible to everyone who may describe the job; store it in "
            "Secrets Manager and fetch it in the job",
        )


def _find_secret(path: KeyPath, value: str) -> str | None:
    """Find a credential; in mappings with the user's own keys, the key counts as well."""
    if path[0] == "tags" or "environment" in path[:-1]:
        return find_secret_in_setting(str(path[-1]), value)
    if str(path[-1]).endswith("_secret"):
        return find_known_format(value)  # else it is the name of a secret
    return find_secret(value)


def _validation_errors(model: type[BaseModel], raw: Any) -> list[ErrorDetails]:
    try:
        model.model_validate(raw)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _without(raw: dict[Any, Any], paths: Iterable[KeyPath]) -> dict[Any, Any]:
    """Return a copy of ``raw`` without the keys at ``paths``."""
    pruned = copy.deepcopy(raw)
    for path in paths:
        parent: Any = pruned
        for key in path[:-1]:
            if isinstance(parent, dict):
                parent = parent.get(key)
            elif isinstance(parent, list) and isinstance(key, int) and key < len(parent):
                parent = parent[key]
            else:
                parent = None
        if path and isinstance(parent, dict):
            parent.pop(path[-1], None)
    return pruned


def _find_cross_section_problems(raw: dict[Any, Any]) -> list[Problem]:
    """Check the valid sections against each other, then the fallbacks if all agree."""
    raw_stages, raw_cluster = raw.get("stages"), raw.get("cluster")
    stages = [
        (index, StageSection.model_validate(stage))
        for index, stage in enumerate(raw_stages if isinstance(raw_stages, list) else [])
        if not _validation_errors(StageSection, stage)
    ]
    name = raw.get("name")
    type_name = raw_cluster.get("instance_type") if isinstance(raw_cluster, dict) else None
    try:
        gpus = instance_type(str(type_name)).accelerators
    except UnknownInstanceTypeError:
        gpus = None
    cluster = None
    if not _validation_errors(ClusterSection, raw_cluster):
        cluster = ClusterSection.model_validate(raw_cluster)
    training = None
    if not _validation_errors(TrainingSection, raw.get("training", {})):
        training = TrainingSection.model_validate(raw.get("training", {}))
    model = None
    if not _validation_errors(ModelSection, raw.get("model", {})):
        model = ModelSection.model_validate(raw.get("model", {}))
    run_name = name if isinstance(name, str) else ""
    raw_channels = raw.get("channels")
    channels = raw_channels if isinstance(raw_channels, dict) else {}
    data = None
    if not _validation_errors(DataSection, raw.get("data")):
        data = DataSection.model_validate(raw.get("data"))
    problems = cross_section_problems(
        RunParts(
            run=run_name,
            stages=stages,
            gpus_per_instance=gpus,
            cluster=cluster,
            training=training,
            model=model,
            own_script=raw.get("entry") is not None,
            data=data,
            channels={
                str(name): None
                if _validation_errors(ChannelSection, channel)
                else ChannelSection.model_validate(channel)
                for name, channel in channels.items()
            },
        )
    )
    return problems or _find_fallback_problems(raw)


def _find_fallback_problems(raw: dict[Any, Any]) -> list[Problem]:
    """Check the fallbacks of a run that is valid without them."""
    recovery = raw.get("recovery")
    if not isinstance(recovery, dict) or _validation_errors(RecoverySection, recovery):
        return []
    without = raw | {"recovery": {key: recovery[key] for key in recovery if key != "fallbacks"}}
    if _validation_errors(RunConfig, without):
        return []
    config = RunConfig.model_validate(without)
    return fallback_problems(
        config.model_copy(update={"recovery": RecoverySection.model_validate(recovery)})
    )


def _problem(raw: Any, error: ErrorDetails) -> Problem:
    """Translate one of pydantic's errors."""
    # Marks such as [key] are pydantic's and those of a union's variants.
    path: KeyPath = tuple(key for key in error["loc"] if not str(key).startswith("["))
    message = error["msg"]
    if error["type"] == "value_error":
        # A section's own check starts with the key: "max_wait: 60 s is less than …".
        message = message.removeprefix("Value error, ")
        key, separator, rest = message.partition(": ")
        if separator and isinstance(error["input"], dict) and key.isidentifier():
            return Problem((*path, key), None, rest)
        return Problem(path, error["input"], message)
    if error["type"] == "missing":
        return Problem(path, None, "is missing" + _description(path))
    if error["type"] == "extra_forbidden":
        return Problem(path, None, "unknown key" + _suggestion(path))
    if error["type"] == "string_pattern_mismatch":
        pattern = error["ctx"]["pattern"]
        # A value in place of a secret's name may be the secret itself, and logs keep messages.
        value = "***" if pattern in (SECRET_KEY_PATTERN, SECRET_PATTERN) else error["input"]
        return Problem(path, value, pattern_message(pattern))
    if error["type"] == "string_type" and type(error["input"]) in _YAML_SCALARS:
        # Without the value: a secret may be a number.
        kind = _YAML_SCALARS[type(error["input"])]
        return Problem(path, None, f"YAML reads this as {kind}, not as text: quote it")
    message = message.replace("Input should be", "must be").partition(", unable to parse")[0]
    if error["type"] == "literal_error":
        # As YAML writes them.
        message = message.replace("True", "true").replace("False", "false")
    return Problem(path, error["input"], message.replace("a valid", "a").replace("a i", "an i"))


_YAML_SCALARS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    datetime.date: "a date",
    datetime.datetime: "a date",
}
"""What YAML makes of unquoted text such as ``yes``, ``512``, ``1:30`` and ``2024-01-01``."""


def _description(path: KeyPath) -> str:
    parent = _model_at(path[:-1])
    field = parent.model_fields.get(str(path[-1])) if parent else None
    return f": {field.description}" if field and field.description else ""


_HINTS = {
    "lr": "write learning_rate in each of stages",
    "batch_size": "write per_device_batch_size in each of stages",
    "train_batch_size": "write per_device_batch_size in each of stages",
    "global_batch_size": "write effective_batch_size in each of stages",
    "grad_accum": "write gradient_accumulation_steps in each of stages",
    "accumulation": "write gradient_accumulation_steps in each of stages",
    "epochs": "write max_steps in each of stages (optimizer steps)",
    "steps": "write max_steps in each of stages (optimizer steps)",
    "iterations": "write max_steps in each of stages (optimizer steps)",
    "max_train_steps": "write max_steps in each of stages (optimizer steps)",
    "fp16": "write precision: bf16 in training",
    "bf16": "write precision: bf16 in training",
    "mixed_precision": "write precision: bf16 in training",
    "gpus": "write instances in each of stages, and instance_type in cluster",
    "num_gpus": "write instances in each of stages, and instance_type in cluster",
    "spot": "write capacity: spot in cluster",
    "warmup": "write warmup_steps in training",
}
"""Keys of other trainers: what to write instead."""


def _suggestion(path: KeyPath) -> str:
    parent = _model_at(path[:-1])
    if parent is None:
        return ""
    known = list(parent.model_fields)
    if (hint := _HINTS.get(str(path[-1]).lower())) and path[-1] not in known:
        return f"; {hint}"
    if places := _sections_with(str(path[-1])):
        return f"; it belongs {' or '.join(places)}"
    close = get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint} (known: {', '.join(known)})"


def _sections_with(key: str) -> list[str]:
    """Return the sections of the run file that have ``key``, as text."""
    if key in RunConfig.model_fields:
        return ["at the top level"]
    return [
        "in each of stages" if section == "stages" else f"in {section}"
        for section in RunConfig.model_fields
        if (model := _model_at((section,))) is not None and key in model.model_fields
    ]


def _model_at(path: KeyPath) -> type[BaseModel] | None:
    """Return the section of the schema at ``path``."""
    model: type[BaseModel] = RunConfig
    for key in path:
        if isinstance(key, int):
            continue
        field = model.model_fields.get(key)
        inner = next(_models_in(field.annotation), None) if field else None
        if inner is None:
            return None
        model = inner
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections inside a type such as ``list[StageSection]`` or ``X | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _line_number(path: KeyPath, lines: dict[KeyPath, int]) -> int:
    """Return the line of ``path``, or of its nearest parent that is in the file."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _format_problem(place: str, problem: Problem) -> str:
    value = "" if problem.value is None else f": {_shown(problem.value)}"
    if problem.path and str(problem.path[-1]).endswith("secret"):
        # A key in place of the name of its secret.
        value = f": {_NOT_SHOWN}"
    return f"{place}: {dotted(problem.path)}{value}: {problem.message}"


def _shown(value: object) -> str:
    text = repr(value)
    if find_secret(text):
        return _NOT_SHOWN
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def dotted(path: KeyPath) -> str:
    """Format ``("stages", 0, "name")`` as ``stages[0].name``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{_name(key)}" if text else _name(key)
    return text


def _name(key: object) -> str:
    """Return a key on one line, without control characters, and shortened."""
    text = str(key)
    # As in a Python string, without its quotes.
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."

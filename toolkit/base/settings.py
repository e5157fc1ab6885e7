"""The user's defaults for every run: region, profile, role and bucket.

A value comes from the first of: the command's flag, the environment (``SM_TRAIN_ROLE``), the run
file, the configuration file. AWS's own profile comes last; ``AWS_PROFILE`` and ``AWS_REGION`` of a
shell override the configuration file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sm_train.toolkit.base.errors import UserError

KEYS = {
    "region": "AWS region of jobs and prices",
    "profile": "AWS profile for credentials",
    "role": "IAM role of the jobs",
    "bucket": "bucket for code, checkpoints and results",
}
"""Setting → what it is."""

_AWS_VARIABLES = {"region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "profile": ("AWS_PROFILE",)}


@dataclass(frozen=True)
class Setting:
    """A value and where it comes from."""

    value: str
    origin: str


def variable(key: str) -> str:
    """Return the environment variable of a setting."""
    return f"SM_TRAIN_{key.upper()}"


def config_path() -> Path:
    """Return the path of the configuration file, which need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "sm-train" / "config.toml"


def from_environment(key: str) -> Setting | None:
    """Return the setting of ``SM_TRAIN_*``.

    Raises:
        UserError: its value is not valid.
    """
    value = os.environ.get(variable(key))
    if not value:
        return None
    require_valid(key, value, variable(key))
    return Setting(value, variable(key))


def from_config(key: str) -> Setting | None:
    """Return the setting of the configuration file, unless AWS's own variable overrides it.

    Raises:
        UserError: the file or the value is not valid.
    """
    for name in _AWS_VARIABLES.get(key, ()):
        if os.environ.get(name):
            return Setting(os.environ[name], name)
    path = config_path()
    value = read_config(path).get(key)
    if value is None:
        return None
    require_valid(key, value, f"{path}: {key}")
    return Setting(value, str(path))


def default_profile() -> str | None:
    """Return the profile of the environment or the configuration file; None is AWS's default."""
    found = from_environment("profile") or from_config("profile")
    return found.value if found else None


_MAX_BYTES = 2**20


@cache
def read_config(path: Path) -> Mapping[str, str]:
    """Return the settings in the file at ``path``; none if it does not exist.

    Raises:
        UserError: it is not TOML, or holds an unknown key or a value that is not text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)  # at most: the path may be a device
        text = content.decode("utf-8")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; delete it or write it again") from None
    if len(content) > _MAX_BYTES:
        raise UserError(f"{path}: more than 1 MiB; delete it or write it again")
    import tomllib

    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also of a huge number
        raise UserError(
            f'{path}: not TOML: {error}; write lines such as region = "us-east-1"'
        ) from None
    for key, value in document.items():
        require_key(key, str(path))
        if not isinstance(value, str):
            raise UserError(f"{path}: {key}: {value!r} must be text in quotes")
    return document


def require_key(key: str, source: str) -> None:
    """Refuse an unknown setting.

    Raises:
        UserError: ``key``, from ``source``, is not in :data:`KEYS`.
    """
    if key in KEYS:
        return
    from difflib import get_close_matches

    close = get_close_matches(key, KEYS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(KEYS)}"
    raise UserError(f"{source}: {key!r} is not a setting; {hint}")


def require_valid(key: str, value: str, source: str) -> None:
    """Refuse a value that no run file would accept.

    Raises:
        UserError: the value, from ``source``, is not valid.
    """
    if key == "profile":  # AWS's configuration knows which exist
        return
    if key == "region":
        from sm_train.estimators.regions import region_problem

        problem = region_problem(value)
    else:
        from sm_train.estimators.config.fields import BUCKET_PATTERN, ROLE_PATTERN, pattern_message

        pattern = ROLE_PATTERN if key == "role" else BUCKET_PATTERN
        problem = None if re.fullmatch(pattern, value) else pattern_message(pattern)
    if problem:
        raise UserError(f"{source}: {value!r} {problem}")


def write_setting(key: str, value: str | None) -> Path:
    """Set ``key`` in the configuration file, or remove it; other lines stay. Return the path.

    Raises:
        UserError: the key, the value or the present file is not valid.
    """
    from sm_train.entrypoints.base.atomic_write import write_atomic

    path = config_path()
    require_key(key, "config")
    if value is not None:
        require_valid(key, value, f"config: {key}")
    read_config(path)  # a file that is not valid stays as it is
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    lines = [line for line in lines if not re.match(rf"\s*{key}\s*=", line)]
    if value is not None:
        lines.append(f"{key} = {json.dumps(value)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
    read_config.cache_clear()
    return path

"""Placeholders in ``entry_args``, the arguments of a run's own training script.

``{checkpoints}`` is replaced by the folder of the job's checkpoints, ``{channel.train}`` by that of
an input channel, and so on: the same run file works in a job and on a laptop. ``{{name}}`` stands
for ``{name}``; braces around anything but a name, as in JSON, are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

RESUME = "resume"
"""The newest complete checkpoint; without one, the argument and its option are left out."""

PLACEHOLDERS = (
    "stage",
    "checkpoints",
    "model",
    "output",
    RESUME,
    "resolution",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "learning_rate",
    "seed",
)
"""Names that every script can use, in addition to ``channel.NAME``."""

CHANNEL = "channel."

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")


def placeholders(argument: str) -> list[str]:
    """Return the names of the placeholders in ``argument``, in order."""
    return [match[2] for match in _PLACEHOLDER.finditer(argument) if match[2]]


def is_known(name: str) -> bool:
    """Return whether a placeholder has a meaning."""
    return name in PLACEHOLDERS or (name.startswith(CHANNEL) and len(name) > len(CHANNEL))


def resolve(arguments: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replace the placeholders of ``arguments`` by ``values``.

    Without a value for ``resume``, an argument that contains it is left out. So is the option
    before it (``--resume_from_checkpoint {resume}``).
    """
    resolved: list[str] = []
    previous = ""
    for argument in arguments:
        if RESUME in placeholders(argument) and RESUME not in values:
            if resolved and _is_option(previous) and not argument.startswith("-"):
                resolved.pop()
        else:
            resolved.append(_PLACEHOLDER.sub(lambda match: _value(match, values), argument))
        previous = argument
    return resolved


def _is_option(argument: str) -> bool:
    return argument.startswith("-") and "=" not in argument and not placeholders(argument)


def _value(match: re.Match[str], values: Mapping[str, str]) -> str:
    return f"{{{match[1]}}}" if match[1] else values[match[2]]

"""Find random values in the places where code, shells and settings files write credentials.

A value is a credential if its name is that of one, such as ``api_token``, and it looks random; a
long random string in quotes needs no name.
"""

from __future__ import annotations

import itertools
import math
import re
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from detect_secrets.plugins.high_entropy_strings import HighEntropyStringsPlugin

_MIN_RANDOM = 20
_MAX_RANDOM = 200
"""Lengths of a random string. Longer ones are data, such as an image in a notebook."""

# The library's limit for the entropy of base64, in bits per character.
_BASE64_BITS = 4.5
# A string of 20 different characters has 4.3 bits, so the name of a secret lowers the limit.
_NAMED_BITS = 2.5
_MIN_ALTERNATION = 0.2

_KEYS = (
    "api|access|account|admin|app|auth|client|encryption|license|master|private|secret|service|"
    "session|signing|shared|storage"
)
SECRET_NAME = re.compile(
    rf"(?i)(?:{_KEYS})[_-]?key|secret|token|passw(?:or)?d|passphrase|\bpwd\b|_pwd\b|\bpwd_|"
    r"credential|webhook|\bpass\b"
)
_NAMES = "key|pass|pwd|secret|token|auth|cred|webhook"
_HAS_NAME = re.compile(rf"(?i){_NAMES}|\bpat\b|\bsig|-signature")
# A line without one of these words or a long string needs no closer look.
CANDIDATE = re.compile(rf"(?i){_NAMES}|[A-Za-z0-9+/=_-]{{{_MIN_RANDOM}}}")
# NAME=value, as in a shell: code has spaces around "=" or a lower-case name.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*=")
_KEY_VARIABLE = re.compile(r"_(?:KEY|PAT)=")
_ALPHABETS = f"{string.digits}{string.ascii_uppercase} {string.ascii_lowercase}{string.digits}"
_CHECKSUM_NAME = re.compile(r"(?i)sha\d|hash|commit|revision|digest|md5|checksum|etag|uuid|nonce")
_QUOTED = re.compile(rf"([\"'`])([A-Za-z0-9+/=_-]{{{_MIN_RANDOM},{_MAX_RANDOM}}})\1")
_VALUE = r"[^\s\"'`,;<>(){}\[\]$]"
_ASSIGNMENT = re.compile(
    r"(?<![\w.:-])(?P<name>[\w.-]{2,80})[\"'\]]{0,2}\s{0,8}(?:=>|:=|=|:)\s{0,8}"
    r"(?:[bru]{1,2}(?=[\"']))?"
    rf"(?P<quote>[\"'`]?)(?P<value>{_VALUE}{{8,200}})(?P=quote)(?=[\s,;)}}\]\\\"'`<&]|$)"
)
_END = r"(?=[\s\"'`\\,;)\]]|$)"
_NAMED_VALUES = (
    # https://acme.com/?token=value
    re.compile(rf"[?&;](?P<name>[\w.-]{{2,60}})=(?P<value>(?:(?![&#]){_VALUE}){{16,1000}})"),
    # --token value
    re.compile(
        rf"(?<![\w-])--?(?P<name>[A-Za-z][\w.-]{{2,60}})[\s=]\s{{0,4}}[\"']?(?P<value>{_VALUE}{{8,200}}){_END}"
    ),
    # ENV TOKEN value, set -x TOKEN value, %env TOKEN value
    re.compile(
        r"(?<!\w)(?:ENV|ARG|setx?|setenv|export|%env|%set_env)\s+(?:-\w+\s+)?"
        rf"(?P<name>[A-Z][A-Z0-9_]{{2,60}})\s+[\"']?(?P<value>{_VALUE}{{8,200}}){_END}"
    ),
    # <token>value</token>
    re.compile(rf"<(?P<name>[\w.:-]{{2,60}})>(?P<value>{_VALUE}{{8,200}})</(?P=name)>"),
    # getenv("TOKEN", "value"), add_argument("--token", default="value"), name="token" value="value"
    re.compile(
        r"[\"'](?P<name>[\w.-]{2,80})[\"'](?:\s{0,4},\s{0,4}(?:default\s?=\s?)?|\s{1,4}value=)"
        rf"[\"'](?P<value>{_VALUE}{{8,200}})[\"']"
    ),
    # set_token("value")
    re.compile(
        rf"(?P<name>\w{{3,60}})\(\s{{0,4}}[\"'](?P<value>{_VALUE}{{16,200}})[\"']\s{{0,4}}[,)]"
    ),
    # auth=("user", "value")
    re.compile(
        rf"\b(?P<name>auth)\s?=\s?\(\s?[\"'][^\"']{{1,80}}[\"'],\s?[\"'](?P<value>{_VALUE}{{8,200}})[\"']"
    ),
)
"""Other places of a name and its value; only values that a program has generated count there."""

_NAME_OF_GENERATED = re.compile(
    rf"(?i){SECRET_NAME.pattern}|^(?:key|pat|auth|sig|signature)$|-signature$"
)
_PLACEHOLDER = re.compile(
    r"(?i)^(?:your|my|some|the|a|an|insert|enter|replace|change|dummy|fake|test|example|sample|"
    r"todo|none|null|true|false|x{4,}|\*{3,}|\.{3,})(?:[_.-]|$)|x{6,}|\*{3,}"
)
_REFERENCE = re.compile(r"^(?:arn:|s3://|https?://|file:|/|\./|~/|%|\{)")
_UNQUOTED_VALUES = tuple(
    ".env .sh .bash .ini .cfg .conf .cnf .properties .yaml .yml .toml .txt .tfvars".split()
)
"""Files in which a value needs no quotes, as do files without a suffix and dotfiles."""


@contextmanager
def without_requests() -> Iterator[None]:
    """Import the library without ``requests``, which is 0.2 s of its 0.25 s.

    It asks a service whether a secret is valid, which this module never does. At import, only the
    name of its response is needed, for annotations.
    """
    if "requests" in sys.modules:
        yield
        return
    unused = ModuleType("requests")
    unused.Response = object  # type: ignore[attr-defined]
    sys.modules["requests"] = unused
    try:
        yield
    finally:
        del sys.modules["requests"]


def find_random_value(line: str, path: str) -> str | None:
    """Find the random value of a name of secrets, or a long random string in quotes."""
    for match in _ASSIGNMENT.finditer(line):
        name, quote, value = match.group("name", "quote", "value")
        assigned = line[match.start() : match.start("value")]
        is_variable = _VARIABLE.fullmatch(assigned) is not None
        is_key = is_variable and len(value) >= _MIN_RANDOM and _KEY_VARIABLE.search(assigned)
        if not (SECRET_NAME.search(name) or is_key) or _CHECKSUM_NAME.search(name):
            continue
        if (quote or is_variable or _allows_unquoted(path)) and is_random(value):
            return "a credential"
    for expression in _NAMED_VALUES if _HAS_NAME.search(line) else ():
        for match in expression.finditer(line):
            name, value = match.group("name", "value")
            is_name = _NAME_OF_GENERATED.search(name) and not _CHECKSUM_NAME.search(name)
            if is_name and _is_generated(value):
                return "a credential"
    for _, value in _QUOTED.findall(line):
        if _is_random_base64(value) and not _CHECKSUM_NAME.search(line):
            return "a random string"
    return None


def _allows_unquoted(path: str) -> bool:
    name = path.lower().rpartition("/")[2]
    return name.endswith(_UNQUOTED_VALUES) or name.startswith(".") or "." not in name


def is_random(value: str) -> bool:
    """Return whether ``value`` is neither a word nor a reference: digits, letters, high entropy."""
    return (
        len(value) >= 8
        and any(character.isdigit() for character in value)
        and any(character.isalpha() for character in value)
        and not is_placeholder(value)
        and _entropy(value) >= _NAMED_BITS
    )


def is_placeholder(value: str) -> bool:
    """Return whether ``value`` stands for a credential or refers to one."""
    with without_requests():
        from detect_secrets.filters.heuristic import is_sequential_string, is_templated_secret

    return bool(
        _PLACEHOLDER.search(value)
        or _REFERENCE.search(value)
        or is_templated_secret(value)
        or is_sequential_string(value)
    )


def _is_generated(value: str) -> bool:
    """Return whether a program has generated ``value``: letters and digits alternate.

    A name such as V1SecretReference changes between them, or to a capital letter, at few of its
    characters; a random string of letters and digits at 40 % of them.
    """
    return is_random(value) and _alternation(value) >= _MIN_ALTERNATION


def _alternation(value: str) -> float:
    """Return the share of characters of another class than the one before; "Ab" has one class."""
    classes = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in value if c.isalnum()]
    pairs = itertools.pairwise(classes)
    changes = sum(pair[0] != pair[1] and pair != ("u", "l") for pair in pairs)
    return changes / max(1, len(classes) - 1)


def _is_random_base64(value: str) -> bool:
    """Return whether ``value`` is base64 whose characters are as diverse as random ones."""
    bits = min(_BASE64_BITS, math.log2(len(value)) - 0.75)
    return (
        _is_base64(value)
        and _entropy(value) > bits
        and (_entropy(value) > _BASE64_BITS or not _has_words(value))
        and not is_placeholder(value)
    )


def _has_words(value: str) -> bool:
    """Return whether ``value`` looks like a name such as Glm4MoeLiteForCausalLM."""
    in_words = sum(map(len, re.findall("[a-z]{3,}", value)))
    return _alternation(value) < 0.3 or in_words >= 0.4 * len(value)


def _is_base64(value: str) -> bool:
    """Return whether the characters are those of one base64 alphabet; a model's id mixes two.

    An alphabet in its order, and settings such as block=16_stages=4, are no base64.
    """
    return (
        "=" not in value.rstrip("=")
        and not any(value[start : start + 8] in _ALPHABETS for start in range(len(value) - 7))
        and any(character.isdigit() for character in value)
        and any(character.isupper() for character in value)
        and any(character.islower() for character in value)
        and not (set(value) & set("+/") and set(value) & set("-_"))
    )


def _entropy(value: str) -> float:
    """Return the Shannon entropy of the characters, in bits."""
    return _entropy_detector().calculate_shannon_entropy(value)


@cache
def _entropy_detector() -> HighEntropyStringsPlugin:
    with without_requests():
        from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString

    return Base64HighEntropyString(_BASE64_BITS)

"""Remove terminal control from text of log lines, file names, captions and AWS responses."""

from __future__ import annotations

import re

# ECMA-48: a control sequence (CSI), a string (OSC, DCS, SOS, PM, APC) with its terminator, and any
# other escape sequence; each starts with ESC or with one character of the C1 set.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-Z\\^-~]"
)
# C0 except tab and line feed, DEL and C1; line separators; and the controls that reorder text
# (Unicode's Bidi_Control property, and the deprecated ones that follow them).
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f]"
)
# What os.fsdecode makes of a byte that is no UTF-8, which a terminal may take for C1.
_SURROGATES = re.compile("[\ud800-\udfff]")


def without_sequences(text: str) -> str:
    """Return ``text`` without escape sequences; single control characters stay."""
    return _SEQUENCES.sub("", text)


def printable(text: str) -> str:
    """Return ``text`` without escape sequences, control characters and bidirectional controls.

    Tabs and line feeds stay; half a surrogate pair becomes U+FFFD. A terminal then displays the
    text and does nothing else: it changes no title, clipboard, color or cursor, and displays the
    characters in their order.
    """
    without = _CONTROLS.sub("", without_sequences(text.replace("\r\n", "\n")))
    return _SURROGATES.sub("\ufffd", without)

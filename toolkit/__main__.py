"""``python -m sm_train.toolkit`` is ``sm-train``."""

from __future__ import annotations

from sm_train.toolkit.cli import main

main()

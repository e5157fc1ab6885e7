"""Lets every Python process that has this folder in ``PYTHONPATH`` crash on some images."""

from __future__ import annotations

from tests.support.images.crashing_decoders import install_crashing_decoders

install_crashing_decoders()

"""Builds data sets: packs, columns, indices and streams."""

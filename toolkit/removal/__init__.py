"""Removes samples from a set of shards for good."""

"""Where runs are: one protocol for every platform, and an adapter for each."""

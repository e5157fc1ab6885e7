"""Random lives of runs on an emulated platform, decided by the product's own functions."""

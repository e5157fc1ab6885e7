"""The doctor: tests a cluster's GPUs, network and storage."""

"""Runs on Kubernetes and Slurm, by the records that their nodes store."""

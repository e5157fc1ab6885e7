"""Runs on Kubernetes and Slurm, as far as their nodes' stored records show them."""

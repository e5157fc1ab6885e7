"""What Slurm does with jobs."""

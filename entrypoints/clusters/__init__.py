"""The first process of a pod or a Slurm task, what nodes store, and the watcher outside."""

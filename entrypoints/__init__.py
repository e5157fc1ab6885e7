"""What runs in the cluster: the trainer, the shard format and the event lines.

This folder is the source bundle that a job receives, and it imports nothing of the rest of the
project. Modules that a laptop shares with the cluster (:mod:`events`, :mod:`directories`,
:mod:`shards`) import neither torch nor boto3.
"""

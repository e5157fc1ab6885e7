"""A program of its own: copies an object of S3 to a file, with Python and boto3 alone.

    python fetch_object.py s3://BUCKET/KEY FILE

A node of Slurm runs its text before it has anything else of sm-train. As everywhere, S3 compares
the bucket's account: the one that was declared, else the caller's own.
"""

import os
import sys

try:
    import boto3

    bucket, _, key = sys.argv[1].removeprefix("s3://").partition("/")
    pairs = os.environ.get("SM_TRAIN_BUCKET_OWNERS", "").split(",")
    owner = dict(pair.partition("=")[::2] for pair in pairs).get(bucket)
    owner = owner or boto3.client("sts").get_caller_identity()["Account"]
    expected = {} if owner == "any" else {"ExpectedBucketOwner": owner}
    boto3.client("s3").download_file(bucket, key, sys.argv[2], ExtraArgs=expected)
except Exception as error:
    sys.exit(f"sm-train: error: {sys.argv[1]}: {error}")

# Image of the functions in pack-lambda.yaml. In a checkout of sm-train, logged in to ECR, run:
#
#   sm-train template pack-lambda-image > pack-lambda.Dockerfile
#   docker build --platform linux/amd64 --provenance=false -f pack-lambda.Dockerfile -t IMAGE .
#   docker push IMAGE
# The base is AWS's image of 2026-10-09. For a newer one, pass the digest that
# `docker buildx imagetools inspect public.ecr.aws/lambda/python:3.12` prints:
# --build-arg BASE=public.ecr.aws/lambda/python:3.12@sha256:...
ARG BASE=public.ecr.aws/lambda/python:3.12@sha256:145350008f3f67d82c0bc6ecd34d9eb0c95aecf11f9b69db6bab7de3d5d3cc61
FROM ${BASE}
COPY estimators/data/requirements-pack-lambda.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --require-hashes -r /tmp/requirements.txt
COPY entrypoints ${LAMBDA_TASK_ROOT}/sm_train/entrypoints
CMD ["sm_train.entrypoints.data_prep.streaming.lambda_handler.stage"]

# Image of the function in pack-lambda.yaml. In a checkout of sm-train, logged in to ECR, run:
#
#   sm-train template pack-lambda-image > pack-lambda.Dockerfile
#   docker build --platform linux/amd64 --provenance=false -f pack-lambda.Dockerfile -t IMAGE .
#   docker push IMAGE
# `docker buildx imagetools inspect public.ecr.aws/lambda/python:3.12` prints the digest to pin.
FROM public.ecr.aws/lambda/python:3.12
COPY estimators/data/requirements-pack-lambda.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --require-hashes -r /tmp/requirements.txt
COPY entrypoints ${LAMBDA_TASK_ROOT}/sm_train/entrypoints
CMD ["sm_train.entrypoints.packing.lambda_handler.handler"]

# Image of the function in pack-lambda.yaml. In a checkout of sm-train, logged in to ECR, run:
#
#   sm-train template pack-lambda-image > pack-lambda.Dockerfile
#   docker build --platform linux/amd64 --provenance=false -f pack-lambda.Dockerfile -t IMAGE .
#   docker push IMAGE
FROM public.ecr.aws/lambda/python:3.12
RUN pip install --no-cache-dir \
    "blake3>=1.0,<2" "boto3>=1.40,<2" "numpy>=1.26,<3" "pillow>=11.3,<14" "pyarrow>=17,<27" \
    "simplejpeg>=1.8,<2"
COPY entrypoints ${LAMBDA_TASK_ROOT}/sm_train/entrypoints
CMD ["sm_train.entrypoints.packing.lambda_handler.handler"]

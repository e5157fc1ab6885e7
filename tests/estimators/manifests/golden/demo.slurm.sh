#!/bin/bash
#SBATCH --job-name=digits-digits
#SBATCH --dependency=singleton
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --time=60
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --output=/fsx/sm-train/digits/logs/%x-%j.log
# sm-train/run: digits
# sm-train/stage: digits
# sm-train/bundle: 5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f
# sm-train/commit: 0000000000000000000000000000000000000000
set -euo pipefail

export SM_TRAIN_NODE='{"stage":"digits","entry":"train.py","instance_type":"ml.g5.xlarge","nodes":2,"processes":1,"channels":[{"name":"train","uri":"s3://my-bucket/digits/shards/","path":null,"sharded":true},{"name":"index","uri":"s3://my-bucket/digits/index.parquet","path":null,"sharded":false}],"checkpoints":"/fsx/sm-train/digits/checkpoints/digits","launcher":"torchrun","platform":"slurm","commands":{"status":"squeue --name=digits-digits","stop":"scancel --name=digits-digits --signal=TERM","resume":"sbatch digits-digits.sbatch"},"take_over":false}'
export AWS_REGION=us-east-1
export AWS_DEFAULT_REGION=us-east-1
export NCCL_DEBUG=INFO
export NCCL_DEBUG_SUBSYS=INIT,NET
export PYTHONUNBUFFERED=1
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/tmp/sm-train-nccl-
export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/tmp/sm-train-nccl-
export SM_TRAIN_BUNDLE=5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f
export SM_TRAIN_COMMIT=0000000000000000000000000000000000000000
export SM_TRAIN_REMOVALS_0=train=s3://my-bucket/digits/index.parquet.removed
export SAGEMAKER_BASE_DIR=/tmp/sm-train-$SLURM_JOB_ID

# The code, fetched once for all nodes; another digest ends the job.
code=/fsx/sm-train/digits/code/5f5f5f5f5f5f5f5f
archive=$code/sourcedir.tar.gz
check() { echo "5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f  $archive" | sha256sum --check --quiet -; }
mkdir -p "$code"
if ! check &>/dev/null; then
    aws s3 cp --only-show-errors s3://my-bucket/digits/code/manifest-5f5f5f5f5f5f5f5f/sourcedir.tar.gz "$archive"
    check
fi

# HyperPod repeats the step on replaced nodes; only its srun has this option.
resume=()
if [ -d /opt/sagemaker_cluster ]; then resume=(--auto-resume=1); fi
begin=$(mktemp "$code/.begin-XXXXXX")
status=0
srun "${resume[@]}" --label --kill-on-bad-exit=1 --cpu-bind=none ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} --container-image='111122223333.dkr.ecr.us-east-1.amazonaws.com#train:1' --container-mounts=/fsx/sm-train:/fsx/sm-train,/tmp:/tmp bash -c 'rm -rf "$SAGEMAKER_BASE_DIR/input/data/code" && mkdir -p "$SAGEMAKER_BASE_DIR/input/data/code" && tar -xzf "$1" -C "$SAGEMAKER_BASE_DIR/input/data/code" && cd "$SAGEMAKER_BASE_DIR/input/data/code" && exec python3 -m sm_train.entrypoints.node_start.start' start "$archive" || status=$?

# Continue after a failure with a new checkpoint, and after a time limit.
again=
if [ "$status" -ne 0 ]; then
    found=$(find /fsx/sm-train/digits/checkpoints/digits/job-records -name node.json -newer "$begin" 2>/dev/null || true)
    if grep -qE '"exit_code": 75[,}]' $found /dev/null; then again=progress; fi
    if [ "$status" -eq 143 ] || grep -qE '"exit_code": 143[,}]' $found /dev/null; then
        export SLURM_TIME_FORMAT=standard
        end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e || true)
        [ -z "$end" ] || end=$(date -d "$end" +%s 2>/dev/null || true)
        saved=$(find /fsx/sm-train/digits/checkpoints/digits -name complete.json -newer "$begin" 2>/dev/null || true)
        [ -n "$saved" ] || [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] || end=
        if [ -n "$end" ] && [ $((end - $(date +%s))) -le 240 ]; then
            again=time
        fi
    fi
fi
rm -f "$begin"
if [ -n "$again" ]; then
    echo "sm-train: queued again ($again), restart ${SLURM_RESTART_COUNT:-0}"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

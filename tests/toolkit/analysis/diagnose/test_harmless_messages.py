"""Tests that messages which end no job are never the cause: without a failure, or next to one."""

from __future__ import annotations

import pytest
from sm_train.toolkit.analysis.diagnose.signatures import signatures

from tests.support.log_lines import DONE, HEALTHY, WRITTEN, diagnosed, step

HARMLESS = r"""\
algo-1:101:400 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.
algo-1:101:400 [0] NCCL INFO Failed to open libibverbs.so[.1]
algo-1:101:400 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so libnccl-net.so. Using internal tuner plugin.
algo-1:101:400 [0] NCCL INFO Call to bind failed: Address already in use
algo-1:101:400 [0] NCCL INFO socketPollConnect: connect returned Connection refused, retrying (3/34) after sleep for 300 msec
algo-1:101:400 [0] NCCL INFO comm 0x55d rank 0 nranks 16 cudaDev 0 busId 101c0 - Abort COMPLETE
algo-1:101:400 [0] misc/socket.cc:200 NCCL WARN NCCL_NET_MERGE_POLICY: unknown value 'x', defaulting to ALL
algo-1:101:400 [0] init.cc:400 NCCL WARN NCCL_WORK_FIFO_BYTES=3 is being ignored because it is not a power of 2.
algo-1:101:400 [0] transport/net_ib.cc:123 NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: GID table change(18)
algo-1:101:400 [0] nccl_net_ofi_init:150 NCCL WARN NET/OFI Failed to find shared library info. Not configuring NCCL_TUNER_PLUGIN.
libfabric:101:1673041636:core:core:ofi_hmem_init():421<warn> Failed to initialize hmem iface FI_HMEM_CUDA: Input/output error
libfabric:101:1673041636::efa:fabric:efa_fork_support_enable_if_requested():120<warn> Fork support requested but ibv_fork_init failed: Invalid argument
[rank0]:[W1121 10:00:21.412354 ProcessGroupNCCL.cpp:1476] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources. For more info, please see https://pytorch.org/docs/stable/distributed.html#shutdown (function operator())
[rank3]:[W1121 10:00:21.412354 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=84, addr=[algo-2]:44862, remote=[algo-1]:7777): failed to recv, got 0 bytes
[rank3]:[W1121 10:00:21.412354 ProcessGroupNCCL.cpp:1659] [PG ID 0 PG GUID 0 Rank 3] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: failed to recv, got 0 bytes
[W1121 10:00:21.412354 socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not supported by protocol).
[W1121 10:00:21.412354 socket.cpp:697] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - Cannot assign requested address).
[W reducer.cpp:1300] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the forward pass.
W1121 10:00:00.123000 77 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal performance in your application as needed.
W1121 10:00:00.123000 77 torch/_dynamo/convert_frame.py:906] [0/8] torch._dynamo hit config.recompile_limit (8)
/opt/conda/lib/python3.11/site-packages/torch/nn/modules/conv.py:456: UserWarning: Plan failed with a cudnnException: CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: cudnnFinalizeDescriptor Failed cudnn_status: CUDNN_STATUS_NOT_SUPPORTED (Triggered internally at ../aten/src/ATen/native/cudnn/Conv_v8.cpp:919.)
FutureWarning: You are using `torch.load` with `weights_only=False` (the current default value), which uses the default pickle module implicitly. It is possible to construct malicious pickle data which will execute arbitrary code during unpickling
/opt/conda/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 12 leaked semaphore objects to clean up at shutdown
huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...
Some weights of the model checkpoint at openai/clip-vit-large-patch14 were not used when initializing CLIPTextModel: ['vision_model.encoder.layers.20.mlp.fc1.weight']
Token indices sequence length is longer than the specified maximum sequence length for this model (97 > 77). Running this sequence through the model will result in indexing errors
The following values were not passed to `accelerate launch` and had defaults used instead:
Cannot initialize model with low cpu memory usage because `accelerate` was not found in the environment. Defaulting to `low_cpu_mem_usage=False`.
An error occurred while trying to fetch /opt/ml/model/unet: Error no file named diffusion_pytorch_model.safetensors found in directory /opt/ml/model/unet.
'HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. (read timeout=10)' thrown while requesting HEAD https://huggingface.co/x/resolve/main/config.json
Xet Storage is enabled for this repo, but the 'hf_xet' package is not installed. Falling back to regular HTTP download.
Could not cache non-existence of file. Will ignore error and continue. Error: [Errno 30] Read-only file system: '/root/.cache'
WARNING:urllib3.connectionpool:Connection pool is full, discarding connection: s3.us-east-1.amazonaws.com. Connection pool size: 10
2026-11-21 10:00:00,123 botocore.retryhandler DEBUG retry needed, retryable exception caught: Could not connect to the endpoint URL: "https://s3.us-east-1.amazonaws.com/x"
webdataset: RuntimeError('cannot identify image file') ignored, continuing with the next sample
[18026.221140] nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 11012, Non-fatal, Link 46 AN1 Heartbeat Timeout Error (First)
[18026.221140] EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x7 offset:0x0 grain:32 syndrome:0x0)
[18026.221140] pcieport 0000:00:1c.0: AER: Corrected error received: 0000:10:1c.0
[18026.221140] TCP: request_sock_TCP: Possible SYN flooding on port 7777. Sending cookies.
bash: warning: setlocale: LC_ALL: cannot change locale (en_US.UTF-8)
bash: no job control in this shell
Warning: Permanently added 'algo-2,10.0.2.17' (ECDSA) to the list of known hosts.
[algo-1:00120] 15 more processes have sent help message help-mpi-btl-openib.txt / no device params found
mca_base_component_repository_open: unable to open mca_btl_openib: librdmacm.so.1: cannot open shared object file: No such file or directory (ignored)
slurmstepd: error: couldn't chdir to `/home/u/x': No such file or directory: going to /tmp instead
slurmstepd: error: Failed to send MESSAGE_TASK_EXIT: Connection refused
slurmstepd: error: common_file_write_content: unable to write 1 bytes to cgroup
Warning  FailedScheduling  12m  default-scheduler  0/4 nodes are available: 4 Insufficient nvidia.com/gpu.
Insufficient capacity error from EC2 while launching instances, retrying!
2026-11-21 10:00:00 Starting - Insufficient capacity error from EC2 while launching instances, retrying!...
ERROR: pip's dependency resolver does not currently take into account all the packages that are installed. This behaviour is the source of the following dependency conflicts.
OSError: [Errno 5] Input/output error: '/opt/ml/input/data/train/1.tar' (attempt 1 of 5, retrying)
wandb: Network error (ReadTimeout), entering retry loop.
2026-11-21 10:00:00.123: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:479] Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when one has already been registered
[2026-11-21 10:00:00,123] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768
skipping batch after torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
/opt/conda/lib/python3.11/site-packages/PIL/TiffImagePlugin.py:900: UserWarning: Truncated File Read
[mov,mp4,m4a,3gp,3g2,mj2 @ 0x7f] moov atom not found, skipping video 12""".splitlines()  # noqa: E501
"""Warnings, retries and messages of a shutdown, as their sources print them: NCCL, aws-ofi-nccl,
libfabric, c10d, torchrun, PyTorch, Hugging Face, botocore, the kernel, bash, Open MPI, Slurm,
Kubernetes, SageMaker, pip, DeepSpeed and decoders."""
BEFORE_START = ("FailedScheduling", "Insufficient capacity error")
TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 12, in <module>']
FAILURES = {
    "gpu-out-of-memory": [*TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory. Tried"],
    "program-error": [*TRACEBACK, "ValueError: The encoder was given a picture upside down"],
    "process-killed": ["start.sh: line 12:  4242 Killed                  python train.py"],
    "nccl-timeout": [
        "[rank3]:[E1121 10:00:21.412354 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=17, OpType=ALLREDUCE, Timeout(ms)=600000)"
    ],
}
STEPS = [step(number, WRITTEN - 1000 + number) for number in range(20)]
MORE_STEPS = [step(number, WRITTEN - 900 + number) for number in range(20, 30)]


def test_completed_job_with_a_message_is_no_failure() -> None:
    mismatches = [
        f"{line}: {found.cause}"
        for line in HARMLESS
        for log in ([line, *STEPS], [*STEPS, line, *MORE_STEPS], [*STEPS, line])
        for found in [diagnosed([*HEALTHY, *log, DONE])]
        if found.cause != "no-failure"
    ]
    assert not mismatches, "\n".join(mismatches)


def test_message_at_the_end_of_a_log_is_at_most_of_low_confidence() -> None:
    accused = [
        line
        for line in HARMLESS
        if not any(text in line for text in BEFORE_START)
        and diagnosed([*HEALTHY, *STEPS, line]).confidence not in (None, "low")
    ]
    assert not accused, "\n".join(accused)


@pytest.mark.slow
@pytest.mark.parametrize("code", FAILURES)
def test_message_next_to_a_failure_is_not_its_cause(code: str) -> None:
    failure = FAILURES[code]
    mismatches = [
        f"{line}: {found.cause}"
        for line in HARMLESS
        for log in ([*STEPS, line, *failure], [*STEPS, *failure, line], [line, *failure])
        for found in [diagnosed([*HEALTHY, *log])]
        if found.cause != code
    ]
    assert not mismatches, "\n".join(mismatches)


def test_program_that_fails_has_had_its_capacity_image_and_mounts() -> None:
    for signature in signatures().values():
        if not signature.before_start:
            continue
        for line in signature.examples:
            assert diagnosed([*HEALTHY, line]).cause == signature.code
            if line.startswith("FailureReason"):
                continue
            found = diagnosed([*HEALTHY, line, *FAILURES["program-error"]])
            assert found.cause == "program-error"


def test_ranks_that_wait_for_one_without_capacity_do_not_show_that_it_started() -> None:
    timeout = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients."
    event = "Warning  FailedScheduling  3m  0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    assert diagnosed([event, *TRACEBACK, timeout]).cause == "capacity"


def test_bars_of_ranks_that_still_load_do_not_outlive_a_failure() -> None:
    bars = [
        f"Loading pipeline components...: {10 * n}%|##  | {n}/10 [00:0{n}<00:09]" for n in (1, 4)
    ]
    assert diagnosed([*FAILURES["gpu-out-of-memory"], *bars]).cause == "gpu-out-of-memory"

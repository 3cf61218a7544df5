"""The machine, what stages take of it, where verl and vLLM are installed. Nothing here enters a stage's identity."""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Count, Positive, Settings

Share = Annotated[float, Field(gt=0, lt=1)]  # of a GPU's memory


class VerlWorkers(Settings):
    """verl lives in a Python environment of its own (`make verl-env`); opdctl starts its trainers there."""

    python: str = ".venv-verl/bin/python"  # its interpreter; relative to the workspace
    device: Literal["cuda", "cpu"] = "cuda"
    ray_address: str | None = None  # of a running Ray cluster; absent: each stage starts its own and stops it
    stall_timeout_s: Positive = 3600.0  # without an event, a log line or CPU use: the stage is ended as hung


class VllmWorkers(Settings):
    python: str = ".venv-verl/bin/python"  # an environment with vLLM
    device: Literal["cuda", "cpu"] = "cuda"
    stall_timeout_s: Positive = 1800.0


class Workers(Settings):
    verl: VerlWorkers = VerlWorkers()
    vllm: VllmWorkers = VllmWorkers()


class VerlResources(Settings):
    """The GPUs of a verl stage: `nodes x gpus_per_node` for the trainer and the rollouts that share them, and for OPD
    `teacher_replicas x teacher_tensor_parallel` more for every teacher. `resources.gpus` is computed from these."""

    nodes: Count = 1
    gpus_per_node: Count = 1
    strategy: Literal["fsdp2", "megatron"] = "fsdp2"
    offload: bool = False  # parameters, gradients and optimizer state to the host between phases
    sequence_parallel: Count = 1  # Ulysses (fsdp2) or context parallel (megatron)
    tensor_parallel: Count = 1  # of the trainer, megatron only
    expert_parallel: Count = 1  # of the trainer, megatron only
    pipeline_parallel: Count = 1  # of the trainer, megatron only
    rollout_tensor_parallel: Count = 1
    rollout_memory: Share = 0.5  # of a GPU, for rollout weights and their KV cache
    max_num_seqs: Count = 256  # sequences that one rollout or teacher engine decodes at once
    max_batched_tokens: Count = 8192  # tokens of one forward pass of a rollout or teacher engine
    mode: Literal["sync", "async"] = "sync"  # async: rollouts of the next batch go on while the trainer learns
    teacher_replicas: Count = 1
    teacher_tensor_parallel: Count = 1
    teacher_memory: Share = 0.8
    keep_last: Count = 1  # saves of the recovery state


class VllmResources(Settings):
    tensor_parallel: Count = 1
    memory: Share = 0.8  # of a GPU
    max_num_seqs: Count = 256


class Resources(Settings):
    """What a stage takes from `machine` while it runs, and how it uses it."""

    slots: Annotated[int, Field(ge=0)] = 1
    cpus: Count = 1  # also the number of threads
    gpus: Annotated[int, Field(ge=0)] = 0
    micro_batch_tokens: Count = 16_384  # tokens of one forward and backward pass
    gradient_checkpointing: bool = False  # activations are computed again for the backward pass: less memory, more time
    resident_teachers: Count = 2  # opd: teachers in memory at once; cached: heads, 2 at most
    teacher_states: Literal["direct", "cached"] = "direct"  # cached: their last hidden states lie on disk
    verl: VerlResources = VerlResources()  # read by stages with backend: verl
    vllm: VllmResources = VllmResources()  # read by stages with backend: vllm


class Machine(Settings):
    slots: Count = 1
    cpus: Count = 1
    gpus: Annotated[int, Field(ge=0)] = 0

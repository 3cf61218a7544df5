"""verl 0.9.1 and vLLM 0.28 on a machine without an accelerator.

verl can be given further platforms, but takes an accelerator for granted in the places that `install` mends; each
mend names the file. No installed file is changed, and nothing here runs unless VERL_PLATFORM=cpu.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.plugin.platform import PlatformBase, PlatformRegistry

from opdctl.backends.verl.plugin.imports import when_imported


def install() -> None:
    """Make this process run verl, and vLLM if it serves, on the CPU."""
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    # verl/workers/engine/fsdp/transformer_impl.py registers its engines for cuda and npu; they run on a CPU as well
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    when_imported("verl.utils.distributed", _name_gloo_once)
    when_imported("verl.workers.engine.fsdp.transformer_impl", _pin_no_memory)
    when_imported("vllm.model_executor.layers.utils", _keep_linear_weights)


# --------------------------------------------------------------------------------------------------------- mends


def _name_gloo_once(_: ModuleType) -> None:
    """verl/utils/distributed.py asks for gloo on the CPU and a backend on the device. torch refuses to hear of one
    device twice.
    """
    init = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _pin_no_memory(transformer_impl: ModuleType) -> None:
    """verl/workers/engine/fsdp/transformer_impl.py keeps the weights of a reference model in pinned memory, of which
    there is none without an accelerator.
    """
    transformer_impl.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(  # type: ignore[attr-defined]  # untyped
        pin_memory=False
    )


def _keep_linear_weights(utils: ModuleType) -> None:
    """vllm/model_executor/layers/utils.py packs the weight of a Linear layer once loaded and drops the original, so
    that verl's next synchronisation finds nothing to load into. Multiply by the original instead.
    """

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm  # type: ignore[attr-defined]  # untyped


# ------------------------------------------------------------------------------------------------------ platform


class _CpuModule(ModuleType):
    """`torch.cpu` with what verl calls of `torch.cuda` besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def reset_peak_memory_stats(self, *_: Any) -> None: ...

    def set_per_process_memory_fraction(self, *_: Any) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self, *_: Any) -> int:
        return int(psutil.Process().memory_info().rss)

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total


class CpuPlatform(PlatformBase):  # type: ignore[misc]  # verl carries no types
    """One device, the CPU. Ray counts it as a GPU: `ray.init(num_gpus=N)` gives N logical slots."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuModule("torch_cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        # verl moves tensors `.to(current_device())` (verl/utils/fsdp_utils.py and others), where an int would mean an
        # accelerator; where it writes f"{name}:{current_device()}" it does so for platforms with IPC only
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights go to vLLM through shared memory

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def cudart(self) -> None: ...

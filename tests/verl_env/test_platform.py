"""verl and vLLM on a CPU: each place that takes an accelerator for granted."""

import re
from pathlib import Path

import pytest
import torch
import verl
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_id, get_torch_device


def source(*folders):
    root = Path(verl.__file__).parent
    return "\n".join(path.read_text() for folder in folders for path in (root / folder).rglob("*.py"))


def test_verl_runs_on_the_cpu():
    assert get_platform().device_name == "cpu"
    assert torch.zeros(1).to(get_device_id()).device.type == "cpu"


def test_every_call_that_verl_makes_of_its_device_is_answered():
    called = set(re.findall(r"get_torch_device\(\)\.(\w+)", source("utils", "workers", "trainer", "single_controller")))
    assert len(called) > 10
    assert [name for name in sorted(called) if not hasattr(get_torch_device(), name)] == []


def test_memory_is_told_in_bytes():
    free, total = get_torch_device().mem_get_info()
    assert 0 < free <= total
    assert 0 < get_torch_device().memory_allocated() < total


def test_processes_talk_by_gloo(monkeypatch, tmp_path):
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group_ray

    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": f"file://{tmp_path / 'store'}"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    initialize_global_process_group_ray()
    try:
        numbers = torch.arange(3.0)
        torch.distributed.all_reduce(numbers)
        assert numbers.tolist() == [0.0, 1.0, 2.0]
    finally:
        destroy_global_process_group()


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_verls_engines_are_found(backend):
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    assert EngineRegistry.get_engine_cls("language_model", backend) is FSDPEngineWithLMHead


def test_a_reference_model_pins_no_memory():
    import verl.workers.engine.fsdp.transformer_impl as engine

    assert engine.CPUOffloadPolicy(pin_memory=True).pin_memory is False


def test_vllm_keeps_the_weights_that_verl_loads_into_again():
    import vllm.model_executor.layers.utils as layers

    layer = torch.nn.Linear(64, 32, bias=True)
    weight = layer.weight
    layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight is weight
    with torch.no_grad():
        weight.fill_(1.0)
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))

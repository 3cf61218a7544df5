"""The plug-in reaches every kind of process, and changes only what it must."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = os.environ["PYTHONPATH"].split(os.pathsep)


def python(code, **environment):
    """Standard output of a fresh interpreter, outside of the checkout."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "PYTHONPATH"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=known | environment, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_only_the_package_opdctl_becomes_importable():
    code = """
import sys
before = list(sys.path)
import opdctl_verl, opdctl
print(opdctl.__file__, sys.path == before)
"""
    assert python(code, PYTHONPATH=BOOTSTRAP[0]) == [str(ROOT / "opdctl" / "__init__.py"), "True"]


def test_loaded_before_verl_as_by_a_worker_of_vllm_it_imports_neither_trainers_nor_vllm():
    code = """
import opdctl_verl, sys
from verl.utils.device import get_device_name
heavy = ("vllm", "verl.workers.engine", "verl.trainer.ppo.core_algos", "verl.trainer.distillation.losses")
print(get_device_name(), [name for name in heavy if name in sys.modules])
"""
    environment = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "opdctl_verl"}
    assert python(code, PYTHONPATH=os.pathsep.join(BOOTSTRAP), **environment)[-2:] == ["cpu", "[]"]


def test_with_an_accelerator_nothing_of_verl_is_mended():
    code = """
import torch
init = torch.distributed.init_process_group
import verl, os
import verl.utils.distributed
import verl.workers.engine.fsdp.transformer_impl as engine
from verl.plugin.platform import PlatformRegistry
print(PlatformRegistry.get("cpu"), torch.distributed.init_process_group is init,
      engine.CPUOffloadPolicy.__module__.split(".")[0], os.environ.get("VERL_ENGINE_DEVICE"))
"""
    found = python(code, PYTHONPATH=BOOTSTRAP[0], VERL_PLATFORM="nvidia", VERL_USE_EXTERNAL_MODULES="opdctl_verl")
    assert found == ["None", "True", "torch", "None"]


def test_the_named_version_of_vllm_is_the_installed_one():
    import vllm.version

    assert importlib.metadata.version("vllm").split("+")[0] == vllm.version.__version__.split("+")[0]


@pytest.mark.parametrize("name", ["opdctl_policy_gradient", "opdctl_reverse_kl_topk"])
def test_verls_configuration_knows_the_losses(name):
    from verl.workers.config import DistillationLossConfig

    config = DistillationLossConfig(loss_mode=name, use_policy_gradient=False)
    assert config.loss_settings.use_topk == (name == "opdctl_reverse_kl_topk")


@pytest.mark.parametrize("name", ["mean", "mean_std", "leave_one_out"])
def test_verl_knows_the_estimators(name):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    assert callable(get_adv_estimator_fn(f"opdctl_{name}"))

"""LoRA (arXiv:2106.09685): of chosen matrices only a low-rank difference is trained.

W = W0 + s B A with s = alpha / rank, A [rank, in], B [out, rank]; A begins at random, B at 0, as in peft. The policy
holds W itself, merged anew after every step. So what samples and scores is to the bit what is trained, at the speed
of the model as it was, for every kind of policy.

As W is linear in A and B, the gradients are those of training x -> W0 x + s B (A x):
dL/dA = s B' G and dL/dB = s G A', with G = dL/dW, which exists for one matrix at a time.
"""

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from opdctl.engine.policy import Policy
from opdctl.errors import StageRefused
from opdctl.settings import Lora
from opdctl.weight_files import some

ADAPTER = "adapter"  # folder of a checkpoint
_A, _B = ".lora_A.weight", ".lora_B.weight"


class Adapters:
    """The adapters of a policy, whose other weights no longer learn. `parameters` is what is trained, in float32 at
    least: MODULE.lora_A.weight and MODULE.lora_B.weight.

    Raises StageRefused for targets that the model does not have.
    """

    def __init__(self, policy: Policy, settings: Lora, seed: int) -> None:
        self._settings = settings
        self._scale = settings.alpha / settings.rank
        self._weights = _targets(policy, settings.targets)
        policy.requires_grad_(False)
        self._bases: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self._weights.items():
            out, width = weight.shape
            wide = torch.promote_types(weight.dtype, torch.float32)
            bound = width**-0.5  # kaiming_uniform_(a=sqrt(5)), as nn.Linear
            a = (torch.rand(settings.rank, width, generator=generator) * 2 - 1) * bound
            self.parameters[name + _A] = nn.Parameter(a.to(weight.device, wide))
            self.parameters[name + _B] = nn.Parameter(torch.zeros(out, settings.rank, device=weight.device, dtype=wide))
            self._bases[name] = weight.detach().clone()
            weight.requires_grad_(True)
            weight.register_post_accumulate_grad_hook(partial(self._take, name))

    @torch.no_grad()
    def _take(self, name: str, weight: Tensor) -> None:
        """Gradients of A and B from that of their matrix, which goes."""
        a, b = self.parameters[name + _A], self.parameters[name + _B]
        assert weight.grad is not None
        grad = weight.grad.to(a.dtype)
        weight.grad = None
        for parameter, part in ((a, b.T @ grad), (b, grad @ a.T)):
            part *= self._scale
            parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)

    @torch.no_grad()
    def merge(self) -> None:
        """The policy's weights follow their adapters."""
        for name, weight in self._weights.items():
            change = self.parameters[name + _B] @ self.parameters[name + _A]
            weight.copy_(change.mul_(self._scale).add_(self._bases[name]))

    def save(self, folder: Path) -> None:
        """In peft's format: PeftModel.from_pretrained(the model that training began with, folder)."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"base_model.model.{name}": value.detach().cpu() for name, value in self.parameters.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self._settings.rank,
            "lora_alpha": self._settings.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": sorted(self._weights),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _targets(policy: Policy, names: list[str]) -> dict[str, Tensor]:
    layers = policy.linear_layers()
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    if unknown := [name for name in names if name not in kinds]:
        raise StageRefused(
            f"config.train.lora.targets: the model has no linear layers called {some(unknown)}",
            hint=f"it has {some(kinds)}" if kinds else "it has none at all: train it without lora",
        )
    chosen = {name: weight for name, weight in layers.items() if not names or name.rpartition(".")[2] in names}
    if not chosen:
        raise StageRefused(
            "config.train.lora: the model has no linear layers but its output matrix", hint="train it without lora"
        )
    return chosen

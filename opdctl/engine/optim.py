"""AdamW with float32 masters for low-precision weights, learning-rate schedules, and its state as named tensors."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from opdctl.errors import OpdctlError
from opdctl.settings import Optimizer

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # the keys of torch.optim.AdamW's state of a parameter


def learning_rate(settings: Optimizer, step: int, max_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Warm-up: lr * (step + 1) / (warmup_steps + 1), so the first step already moves. After it, with
    done = (step - warmup_steps) / (max_steps - warmup_steps), the rate goes from lr at done = 0 towards
    lr * min_lr_ratio at done = 1: `linear`, or along half a `cosine`; `wsd` holds lr until the last
    decay_fraction * max_steps steps (never into the warm-up) and falls linearly over these; `constant` holds it.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.lr
    start = settings.warmup_steps
    if settings.schedule == "wsd":
        start = max(start, max_steps - round(settings.decay_fraction * max_steps))
    done = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    left = (1 + math.cos(math.pi * done)) / 2 if settings.schedule == "cosine" else 1 - done
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


class AdamW:
    """AdamW over named parameters. Weights in bfloat16 or float16 are updated through float32 masters.

    Weight decay applies to all parameters. A parameter without gradient is left as it is. A step is
    `zero_grad()`, any number of backward passes, `norm = clip()`, and, if the norm is finite, `step(lr)`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: Optimizer) -> None:
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        self._max_grad_norm = settings.max_grad_norm
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def zero_grad(self) -> None:
        for parameter in (*self._parameters.values(), *self._masters.values()):
            parameter.grad = None

    def clip(self) -> float:
        """Scale the gradients to a global L2 norm of at most `max_grad_norm`; returns the norm they had."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        return float(nn.utils.clip_grad_norm_(self._masters.values(), self._max_grad_norm))

    def step(self, lr: float) -> None:
        """Update the weights from the gradients that `clip` left."""
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()
        self.publish_masters()

    def state_tensors(self) -> dict[str, Tensor]:
        """All that a resumed run needs to go on bit for bit, besides the weights: `exp_avg/NAME`,
        `exp_avg_sq/NAME` and `step/NAME` once a parameter was updated, and `master/NAME` of low-precision weights.
        Not copies.
        """
        tensors = {}
        for name, master in self._masters.items():
            moments = self._adamw.state.get(master, {})
            tensors.update({f"{key}/{name}": moments[key] for key in _MOMENTS if key in moments})
            if master is not self._parameters[name]:
                tensors[f"master/{name}"] = master.detach()
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state_tensors` gave, which must be of the same parameters. Weights follow their masters."""
        self._refuse_other_names(tensors)
        for name, master in self._masters.items():
            if f"step/{name}" in tensors:
                self._adamw.state[master] = {
                    key: tensors[f"{key}/{name}"].to(master.device).clone() for key in _MOMENTS
                }
            else:
                self._adamw.state.pop(master, None)
            if master is not self._parameters[name]:
                master.data.copy_(tensors[f"master/{name}"])
        self.publish_masters()

    def weights(self) -> dict[str, Tensor]:
        """What steps change, by parameter: the weights, or their float32 masters. Not copies; `publish_masters` after
        a change."""
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Low-precision weights follow their masters."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def _refuse_other_names(self, tensors: Mapping[str, Tensor]) -> None:
        must = {f"master/{name}" for name, master in self._masters.items() if master is not self._parameters[name]}
        for key in tensors:
            kind, _, name = key.partition("/")
            if kind in _MOMENTS:
                must.update(f"{moment}/{name}" for moment in _MOMENTS)
            if name not in self._masters or kind not in (*_MOMENTS, "master"):
                must.add(f"no parameter for {key}")
        problems = sorted((must | set(tensors)) - (must & set(tensors)))
        if problems:
            raise OpdctlError(
                f"the optimizer state is not of this model: {', '.join(problems[:3])} ({len(problems)} in all)",
                hint="start the stage anew with --rerun STAGE",
            )


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.bfloat16, torch.float16):
        return nn.Parameter(parameter.detach().float())
    return parameter

"""The learning rate of each step, which verl 0.9.1 cannot be told by its configuration."""

from types import ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from opdctl.backends.verl.plugin.told import told
from opdctl.engine.optim import learning_rate
from opdctl.settings import Optimizer


def take_over(transformer_impl: ModuleType) -> None:
    """Have the engines of verl/workers/engine/fsdp/transformer_impl.py follow `opdctl.engine.optim.learning_rate`.

    They know `constant` and `cosine`, and a warm-up that starts at 0, so that its first step is lost; and they report
    the rate of the step to come.
    """
    transformer_impl.FSDPEngine._build_lr_scheduler = _build_lr_scheduler
    transformer_impl.FSDPEngine.lr_scheduler_step = _lr_scheduler_step


def _build_lr_scheduler(engine: Any, optimizer: torch.optim.Optimizer) -> LambdaLR:
    asked = told()["schedule"]
    settings = Optimizer.model_validate(asked["optimizer"])

    def share(batch: int) -> float:
        # verl moves the schedule once a rollout batch, which takes `updates` optimizer steps
        return learning_rate(settings, batch * asked["updates"], asked["max_steps"]) / settings.lr

    return LambdaLR(optimizer, share)


def _lr_scheduler_step(engine: Any) -> float:
    """Moves on, and returns the rate of the step just made."""
    rate: float = engine.lr_scheduler.get_last_lr()[0]
    engine.lr_scheduler.step()
    return rate

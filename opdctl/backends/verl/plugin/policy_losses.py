"""The surrogates of `opdctl.engine.losses` that verl 0.9.1 has not, as `policy_loss.loss_mode=opdctl_policy_loss`.

Shapes: B sequences, R tokens of the longest response, N tokens of all responses.
"""

from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

from opdctl.backends.verl.plugin.told import told
from opdctl.backends.verl.render_policy_loss import PLUGIN
from opdctl.engine.losses import policy_loss
from opdctl.settings import Mismatch, Surrogate
from opdctl.settings.policy_loss import weighs_by_current


def register() -> None:
    """Make the loss known to verl. Once `verl.trainer.ppo.core_algos` is imported."""
    register_policy_loss(PLUGIN)(_loss)


def _loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    loss_BR, statistics = token_losses(log_prob, old_log_prob, advantages, response_mask, **told()["policy_loss"])
    if rollout_is_weights is not None:
        loss_BR = loss_BR * rollout_is_weights
    loss = agg_loss(loss_mat=loss_BR, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, {f"actor/{name}": value_N.float().mean().item() for name, value_N in statistics.items()}


def token_losses(
    policy_BR: Tensor,
    old_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    surrogate: dict[str, Any],
    mismatch: dict[str, Any] | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`policy_loss` of the tokens in the mask, 0 elsewhere. Rules on pi_old / pi_infer are verl's own to apply; for the
    others `old_BR` holds the sampler's log-probabilities (bypass mode)."""
    rule = _MISMATCH.validate_python(mismatch)
    inside_BR = mask_BR.bool()
    rows_BR = torch.arange(len(mask_BR), device=mask_BR.device)[:, None].expand_as(mask_BR)
    loss_N, statistics = policy_loss(
        _SURROGATE.validate_python(surrogate),
        rule if weighs_by_current(rule) else None,
        policy_BR[inside_BR],
        old_BR[inside_BR],
        old_BR[inside_BR],
        advantages_BR[inside_BR],
        rows_BR[inside_BR],
    )
    return torch.zeros_like(policy_BR).masked_scatter(inside_BR, loss_N), statistics


_SURROGATE: TypeAdapter[Surrogate] = TypeAdapter(Surrogate)
_MISMATCH: TypeAdapter[Mismatch | None] = TypeAdapter(Mismatch | None)

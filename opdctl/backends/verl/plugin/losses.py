"""Distillation losses of `opdctl.engine` inside verl 0.9.1: `opdctl_policy_gradient`, `opdctl_reverse_kl_topk`,
`opdctl_overlap`.

verl's `distillation_loss` (verl/trainer/distillation/losses.py) clamps what a loss function returns by
`loss_max_clamp`, makes advantages of it if `use_policy_gradient`, adds a second policy loss if `use_task_rewards`, and
then takes the mean by `loss_agg_mode`. Here a function returns the loss of each token as it is to be back-propagated,
so that only the mean is left for verl to take; other settings are refused.

Shapes: B sequences, R tokens of the longest response, N tokens of all sequences (prompts included), V vocabulary, K
tokens of the teacher's top-k.
"""

import math
from types import ModuleType
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.autograd.function import once_differentiable
from verl.trainer.distillation.losses import DistillationLossSettings, register_distillation_loss
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor
from verl.workers.config import ActorConfig, DistillationConfig
from verl.workers.utils.padding import no_padding_2_padding

from opdctl.backends.verl.layout import ROUTE
from opdctl.backends.verl.plugin.policy_losses import token_losses
from opdctl.backends.verl.plugin.told import fail, told
from opdctl.engine.chunks import CHUNK_BYTES
from opdctl.engine.divergences import overlap_chunk
from opdctl.engine.losses import opd_advantage
from opdctl.engine.vocab import topk_chunk
from opdctl.errors import OpdctlError
from opdctl.settings.opd import Rest

POLICY_GRADIENT = "opdctl_policy_gradient"
TOPK = "opdctl_reverse_kl_topk"
OVERLAP = "opdctl_overlap"
CANARY_TOKENS = 32  # of one teacher in a micro-batch, from which it is judged
CANARY_SPREAD = 1e-3  # nats: log-probabilities closer together than this are those of no text
CANARY_CERTAIN = -0.1  # nats: a teacher that is sure of every token gives equal ones as well

_Loss = tuple[Tensor, dict[str, Any]]  # loss_BR, metrics


def register() -> None:
    """Make the losses known to verl. Once `verl.trainer.distillation.losses` is imported."""
    register_distillation_loss(DistillationLossSettings(names=[POLICY_GRADIENT], use_estimator=True))(policy_gradient)
    register_distillation_loss(DistillationLossSettings(names=[TOPK], use_topk=True))(reverse_kl_topk)
    register_distillation_loss(DistillationLossSettings(names=[OVERLAP], use_topk=True))(overlap)


def policy_gradient(
    config: ActorConfig, distillation_config: DistillationConfig, model_output: dict[str, Any], data: TensorDict
) -> _Loss:
    """`policy_loss` with the stage's surrogate and A = clip(log pi_T - log pi_theta, +-R_max) + alpha A_orm.

    A_orm is the advantage of the outcome reward that verl's estimator gives; alpha = 0 leaves it out.
    """
    asked = told()["opd"]
    _check(config, distillation_config)
    policy_BR = no_padding_2_padding(model_output["log_probs"], data)
    teacher_BR = no_padding_2_padding(data["teacher_logprobs"], data).squeeze(-1)
    _watch_teachers(teacher_BR, data)
    bound = math.inf if asked["max_advantage"] is None else asked["max_advantage"]
    advantages_BR = opd_advantage(teacher_BR, policy_BR, bound)
    cut_BR = advantages_BR.abs() >= bound
    if asked["outcome_weight"]:
        advantages_BR = advantages_BR + asked["outcome_weight"] * _padded(data["advantages"])
    old_BR, mask_BR = _padded(data["old_log_probs"]), _padded(data["response_mask"])
    loss_BR, statistics = token_losses(policy_BR, old_BR, advantages_BR, mask_BR, asked["surrogate"], asked["mismatch"])
    metrics = {
        "reverse_kl": (policy_BR - teacher_BR).detach(),  # its estimate from the sampled token
        "clip_fraction": cut_BR.float(),
        "ratio_clip_fraction": torch.zeros_like(loss_BR).masked_scatter(
            mask_BR.bool(), statistics["clip_fraction"].to(loss_BR.dtype)
        ),
    }
    return loss_BR * _factors(data, loss_BR), _means(metrics, data)


def reverse_kl_topk(
    config: ActorConfig, distillation_config: DistillationConfig, model_output: dict[str, Any], data: TensorDict
) -> _Loss:
    """`topk_reverse_kl`, which `topk_of_logits` has computed where the logits were."""
    _check(config, distillation_config)
    if config.strategy == "megatron":
        raise OpdctlError(
            f"{TOPK}: megatron splits logits over GPUs, and the loss needs whole rows",
            hint="set resources.verl.strategy to fsdp2",
        )
    _watch_teachers(no_padding_2_padding(data["teacher_logprobs"], data).amax(-1), data)
    values = {name: no_padding_2_padding(value, data) for name, value in model_output.items() if name in _TOPK_OUTPUTS}
    loss_BR = values.pop("distillation_losses")
    return loss_BR * _factors(data, loss_BR), _means({"reverse_kl": loss_BR.detach(), **values}, data)


def overlap(
    config: ActorConfig, distillation_config: DistillationConfig, model_output: dict[str, Any], data: TensorDict
) -> _Loss:
    """-A log pi_theta(y_t) with the A of `engine.divergences.overlap_advantage`, made where the logits were."""
    _check(config, distillation_config)
    _watch_teachers(no_padding_2_padding(data["teacher_logprobs"], data).amax(-1), data)
    values = {name: no_padding_2_padding(model_output[name], data) for name in _OVERLAP_OUTPUTS}
    advantages_BR = values.pop("distillation_losses").detach()
    loss_BR = -advantages_BR * no_padding_2_padding(model_output["log_probs"], data)
    return loss_BR * _factors(data, loss_BR), _means({"reverse_kl": -advantages_BR, **values}, data)


def _check(config: ActorConfig, distillation_config: DistillationConfig) -> None:
    own = distillation_config.distillation_loss
    if own.use_policy_gradient or own.use_task_rewards or own.loss_max_clamp is not None:
        raise OpdctlError(
            f"distillation_loss.loss_mode={own.loss_mode} is the whole loss: it needs use_policy_gradient=False, "
            f"use_task_rewards=False and loss_max_clamp=null, not {own.use_policy_gradient}, {own.use_task_rewards} "
            f"and {own.loss_max_clamp}",
            hint="leave these keys to opdctl",
        )


def _watch_teachers(teacher_BR: Tensor, data: TensorDict) -> None:
    """A canary: a teacher that gives every token the same log-probability, -ln V as a rule, has lost its weights.

    verl would train on: the loss even falls. The reason is left in a file that opdctl reads, and OpdctlError raised.
    """
    mask_BR = _padded(data["response_mask"]).bool()
    routes = tensordict_utils.get(data, ROUTE) if ROUTE in data else ["t0"] * len(teacher_BR)
    for route in dict.fromkeys(routes):
        rows_B = torch.tensor([given == route for given in routes], device=teacher_BR.device)
        logprobs_N = teacher_BR[rows_B][mask_BR[rows_B]]
        if len(logprobs_N) < CANARY_TOKENS or logprobs_N.max() - logprobs_N.min() > CANARY_SPREAD:
            continue
        if (level := logprobs_N.mean().item()) < CANARY_CERTAIN:
            label = told()["opd"]["labels"][route]
            error = OpdctlError(
                f"teacher {label} gives all {len(logprobs_N)} tokens of a batch the same log-probability, {level:.3f}: "
                "it has lost its weights",
                hint="see in the log how its server loaded them; then run again to go on from the last save",
            )
            fail(error)


def _factors(data: TensorDict, loss_BR: Tensor) -> Tensor:
    """What multiplies the loss: the weight of the row's teacher, and verl's correction for the sampler."""
    weights = told()["opd"]["weights"]
    if set(weights.values()) == {1.0}:
        factors = loss_BR.new_ones(len(loss_BR), 1)
    else:
        factors = loss_BR.new_tensor([weights[route] for route in tensordict_utils.get(data, ROUTE)])[:, None]
    if "rollout_is_weights" in data:
        factors = factors * _padded(data["rollout_is_weights"])
    return factors


def _padded(nested: Tensor) -> Tensor:
    """[B, R] of a nested tensor of responses; zeros behind each."""
    return nested.to_padded_tensor(0.0) if nested.is_nested else nested


def _means(values_BR: dict[str, Tensor], data: TensorDict) -> dict[str, Metric]:
    """Means over the tokens of the optimizer batch: verl adds up the micro-batches and averages over the ranks."""
    mask_BR = _padded(data["response_mask"])
    scale = data["dp_size"] / data["batch_num_tokens"]
    return {
        f"distillation/{name}": Metric(AggregationType.SUM, ((value_BR * mask_BR).sum() * scale).item())
        for name, value_BR in values_BR.items()
    }


# ------------------------------------------------------------------------------------------ where the logits are

_TOPK_OUTPUTS = ("distillation_losses", "student_mass", "teacher_mass", "overlap")
_OVERLAP_OUTPUTS = ("distillation_losses", "overlap")


def take_over_topk(module: ModuleType) -> None:
    """verl computes each top-k loss, whatever its name, by the function `compute_forward_kl_topk` of
    verl/trainer/distillation/fsdp/losses.py, which it looks up there at every call.
    """
    forward_kl = module.compute_forward_kl_topk

    def compute_topk(
        student_logits: Tensor,
        teacher_topk_log_probs: Tensor,
        teacher_topk_ids: Tensor,
        config: DistillationConfig,
        data_format: str,
    ) -> dict[str, Tensor]:
        ours = {TOPK: topk_of_logits, OVERLAP: overlap_of_logits}
        compute = ours.get(config.distillation_loss.loss_mode, forward_kl)
        return cast(
            dict[str, Tensor],
            compute(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format),
        )

    module.compute_forward_kl_topk = compute_topk  # type: ignore[attr-defined]  # verl carries no types


def topk_of_logits(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: DistillationConfig,
    data_format: str,
) -> dict[str, Tensor]:
    """Loss [1, N] of each token of the flattened sequences from logits [1, N, V], and signs of its health.

    student_mass, teacher_mass: probability that each gives to the teacher's top-k; overlap: share of the teacher's
    top-k that is among the student's.
    """
    values = _TopK.apply(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        student_logits[0], *_of_this_rank(teacher_topk_ids, teacher_topk_log_probs), told()["opd"]["rest"]
    )
    return {name: value[None] for name, value in zip(_TOPK_OUTPUTS, values, strict=True)}


@torch.no_grad()
def overlap_of_logits(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: DistillationConfig,
    data_format: str,
) -> dict[str, Tensor]:
    """Keye's advantage [1, N] of each token of the flattened sequences from logits [1, N, V], in the place of a loss,
    and the share of the top-k that is in both."""
    logits_NV, (ids_NK, teacher_NK) = student_logits[0], _of_this_rank(teacher_topk_ids, teacher_topk_log_probs)
    advantages, shares = [], []
    for rows in _chunks(logits_NV):
        own = logits_NV[rows].float().log_softmax(-1).topk(ids_NK.shape[-1])
        same_CKK = own.indices[:, :, None] == ids_NK[rows][:, None, :]
        shared_CK = same_CKK.any(-1)
        theirs_CK = (same_CKK * teacher_NK[rows][:, None, :]).sum(-1)
        advantages.append(overlap_chunk(own.values, theirs_CK, shared_CK))
        shares.append(shared_CK.float().mean(-1))
    outputs = (torch.cat(advantages), torch.cat(shares))
    return {name: value[None] for name, value in zip(_OVERLAP_OUTPUTS, outputs, strict=True)}


def _of_this_rank(ids: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """(ids_NK, logprobs_NK) of a teacher's top-k, of the tokens whose logits are here."""
    ids_1NK, logprobs_1NK = ids.values()[None], logprobs.values()[None]
    if get_ulysses_sequence_parallel_world_size() > 1:
        ids_1NK, logprobs_1NK = slice_input_tensor(ids_1NK, dim=1), slice_input_tensor(logprobs_1NK, dim=1)
    return ids_1NK[0].long(), logprobs_1NK[0]


class _TopK(torch.autograd.Function):
    """In chunks of tokens: beside the logits and their gradient no [N, V] tensor exists."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NK: Tensor, teacher_NK: Tensor, rest: Rest) -> tuple[Tensor, ...]:
        ctx.save_for_backward(logits_NV, ids_NK, teacher_NK)
        ctx.rest = rest
        parts = []
        for rows in _chunks(logits_NV):
            logprobs_CV, own_CK = (
                logits_NV[rows].float().log_softmax(-1),
                logits_NV[rows].topk(ids_NK.shape[-1]).indices,
            )
            shared_CK = (ids_NK[rows, :, None] == own_CK[:, None, :]).any(-1)
            mass_C = logprobs_CV.gather(-1, ids_NK[rows]).exp().sum(-1)
            loss_C, _ = topk_chunk(
                logprobs_CV, ids_NK[rows], teacher_NK[rows], torch.empty_like(logprobs_CV), rest=rest
            )
            parts.append((loss_C, mass_C, teacher_NK[rows].exp().sum(-1), shared_CK.float().mean(-1)))
        outputs = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, *_unused: Any) -> tuple[Tensor | None, ...]:
        logits_NV, ids_NK, teacher_NK = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for rows in _chunks(logits_NV):
            logprobs_CV = logits_NV[rows].float().log_softmax(-1)
            work_CV = torch.empty_like(logprobs_CV)
            _, grad_CV = topk_chunk(logprobs_CV, ids_NK[rows], teacher_NK[rows], work_CV, rest=ctx.rest)
            grad_NV[rows] = grad_CV.mul_(grad_N[rows, None])
        return grad_NV, None, None, None


def _chunks(logits_NV: Tensor) -> list[slice]:
    tokens, width = logits_NV.shape
    size = max(1, CHUNK_BYTES // (4 * width))
    return [slice(at * size, (at + 1) * size) for at in range(max(1, math.ceil(tokens / size)))]

"""Batches as verl's trainer hands them to a loss, and the same as flat completion tokens for `opdctl.engine`."""

from dataclasses import dataclass, field

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPActorConfig

VOCABULARY = 13


@dataclass
class Batch:
    """Sequences of unequal lengths with random numbers; `logits_NV` of all tokens, prompts included, is the leaf."""

    prompts: tuple[int, ...] = (2, 3, 1, 4)
    completions: tuple[int, ...] = (4, 1, 6, 3)
    k: int = 1
    seed: int = 0
    routes: tuple[str, ...] = ()
    teacher_NV: Tensor = field(init=False)

    def __post_init__(self):
        torch.manual_seed(self.seed)
        lengths = [p + c for p, c in zip(self.prompts, self.completions, strict=True)]
        self.lengths, tokens = lengths, sum(lengths)
        self.ids_N = torch.randint(VOCABULARY, (tokens,))
        self.logits_NV = torch.randn(tokens, VOCABULARY).requires_grad_()
        self.teacher_NV = torch.randn(tokens, VOCABULARY).log_softmax(-1)
        self.old_noise = 0.3 * torch.randn(sum(self.completions))
        self.outcome = torch.randn(len(lengths))

    # ------------------------------------------------------------------------------------------------ flat tokens

    @property
    def positions_M(self) -> Tensor:
        """Where the logits of each completion token are: one place before it."""
        found, end = [], 0
        for length, completion in zip(self.lengths, self.completions, strict=True):
            end += length
            found += range(end - completion - 1, end - 1)
        return torch.tensor(found)

    @property
    def sequence_M(self) -> Tensor:
        return torch.arange(len(self.completions)).repeat_interleave(torch.tensor(self.completions))

    def logprobs_M(self, logprobs_NV: Tensor) -> Tensor:
        """Of the completion tokens."""
        at = self.positions_M
        return logprobs_NV[at].gather(-1, self.ids_N[at + 1][:, None])[:, 0]

    @property
    def old_M(self) -> Tensor:
        return self.logprobs_M(self.logits_NV.detach().log_softmax(-1)) + self.old_noise

    # ----------------------------------------------------------------------------------------------- as verl has it

    def data(self, **more) -> TensorDict:
        """No padding: nested tensors, as `PPOTrainer._update_actor` sends them."""
        split = self.ids_N.split(self.lengths)
        top = self.teacher_NV.topk(self.k)
        if self.k == 1:  # then it is the next token's
            ids_NK = self.ids_N.roll(-1)[:, None]
            top_NK = self.teacher_NV.gather(-1, ids_NK)
        else:
            ids_NK, top_NK = top.indices, top.values
        both = zip(split, self.prompts, strict=True)
        parts = [(ids[:prompt], ids[prompt:]) for ids, prompt in both]
        data = TensorDict(
            {
                "prompts": nested([prompt for prompt, _ in parts]),
                "responses": nested([completion for _, completion in parts]),
                "input_ids": nested(split),
                "response_mask": nested([torch.ones(len(c), dtype=torch.int64) for _, c in parts]),
                "old_log_probs": nested(self.old_M.split(self.completions)),
                "advantages": nested([a.expand(len(c)) for a, (_, c) in zip(self.outcome, parts, strict=True)]),
                "teacher_logprobs": nested(top_NK.split(self.lengths)),
                "teacher_ids": nested(ids_NK.int().split(self.lengths)),
            },
            batch_size=len(parts),
        )
        if self.routes:
            data["route"] = NonTensorStack(*self.routes)
        totals = {"batch_num_tokens": sum(self.completions), "global_batch_size": len(parts), "dp_size": 1}
        tensordict_utils.assign_non_tensor(data, **(totals | more))
        return data

    def model_output(self) -> dict[str, Tensor]:
        logprobs_NV = self.logits_NV.log_softmax(-1)
        logprobs_N = logprobs_NV.gather(-1, self.ids_N.roll(-1)[:, None])[:, 0]
        return {"log_probs": nested(logprobs_N.split(self.lengths))}


def nested(parts) -> Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def padded(data: TensorDict) -> TensorDict:
    """The same batch with prompts padded on the left and responses on the right."""
    prompts, responses = data["prompts"].unbind(), data["responses"].unbind()
    P, R = max(map(len, prompts)), max(map(len, responses))
    made = data.exclude("prompts", "responses")
    left = [torch.nn.functional.pad(prompt, (P - len(prompt), 0)) for prompt in prompts]
    made["prompts"] = torch.stack(left)
    made["responses"] = data["responses"].to_padded_tensor(0)
    at_P, at_R = torch.arange(P), torch.arange(R)
    made["attention_mask"] = torch.stack(
        [torch.cat([at_P >= P - len(p), at_R < len(r)]).long() for p, r in zip(prompts, responses, strict=True)]
    )
    for name in ("response_mask", "old_log_probs", "advantages"):
        made[name] = data[name].to_padded_tensor(0)
    return made


def actor(**settings) -> FSDPActorConfig:
    return FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **settings)


def distillation(loss_mode, **settings) -> DistillationConfig:
    """Settings as `opdctl.backends.verl.render` gives them to opdctl's losses."""
    own = {
        "use_policy_gradient": False,
        "use_task_rewards": False,
        "loss_max_clamp": None,
        "log_prob_min_clamp": None,
    }
    return DistillationConfig(distillation_loss=DistillationLossConfig(loss_mode=loss_mode, **(own | settings)))

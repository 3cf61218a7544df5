"""What a completion earns in verl: the rewards of the embedded engine (`opdctl/engine/rlvr.py`), from token ids.

verl finds the class by `reward.reward_manager`; each reward worker has one.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from opdctl.backends.verl.judge import Judge
from opdctl.backends.verl.plugin.told import fail, told
from opdctl.engine.advantages import annealed_tau, over_budget, soft_overlong_penalty
from opdctl.engine.rows import Renderer
from opdctl.errors import OpdctlError
from opdctl.settings import EffortBudget, Overlong
from opdctl.tasks import Verdict


class OpdctlRewardManager(RewardManagerBase):  # type: ignore[misc]  # verl carries no types
    """Judges by the stage's own tasks."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **router: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        given = told()
        self.renderer = Renderer(tokenizer, given["eos_ids"])
        self.earned = Earned(given["reward"])
        self.judge = Judge(given["tasks"], given["efforts"], given["workspace"])
        self._one_at_a_time = ThreadPoolExecutor(1, thread_name_prefix="judge")

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """{"reward_score", "reward_extra_info"} of the last sequence of `data`.

        A verifier that fails is told to opdctl by a file, which ends the stage: verl would go on without the
        completion.
        """
        row = data[-1]
        width = row.batch["responses"].shape[-1]
        length = int(row.batch["attention_mask"][-width:].sum())
        tokens = row.batch["responses"][:length].tolist()
        given = row.non_tensor_batch
        prompt, task = given["reward_model"]["ground_truth"], given["extra_info"]["task"]
        text = self.renderer.texts([tokens])[0]
        loop = asyncio.get_running_loop()
        try:
            verdict = await loop.run_in_executor(self._one_at_a_time, self.judge.verify, task, prompt, text)
        except OpdctlError as error:
            fail(error)
        finished = bool(tokens) and tokens[-1] in self.renderer.eos_ids
        # the row tells its budget, verl the step (from 1) for which the row was dealt
        return self.earned(verdict, length, finished, given["extra_info"]["budget"], int(given["global_steps"]))


class Earned:
    """A completion's reward and what is reported of it, by the settings that `data.plugin_settings` writes."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.unfinished_reward = float(given["unfinished_reward"])
        self.overlong = Overlong.model_validate(given["overlong"])
        self.effort = EffortBudget.model_validate(given["effort"]) if given["effort"] else None
        self.max_completion_tokens = int(given["max_completion_tokens"])
        self.max_steps, self.updates = int(given["max_steps"]), int(given["updates"])

    def __call__(
        self,
        verdict: Verdict,
        length: int,
        finished: bool,
        budget: float | None,
        batch: int,
        *,
        taken: int | None = None,
    ) -> dict[str, Any]:
        """`length` in tokens that the model wrote, EOS included; `budget` is b0(x); `batch` is verl's step, from 1;
        `taken`: with an episode's observations, which use up its limit too."""
        reward = float(verdict.reward) if finished else self.unfinished_reward
        told = {"accuracy": float(verdict.correct and finished), "length": float(length), "finished": float(finished)}
        if self.overlong.handling == "soft_penalty":
            penalty = soft_overlong_penalty(taken or length, self.max_completion_tokens, self.overlong.buffer_tokens)
            reward += float(torch.tensor(penalty))  # float32, as the embedded engine adds it
        if self.effort is not None:
            assert budget is not None
            tau = annealed_tau(self.effort, (batch - 1) * self.updates, self.max_steps)
            over = over_budget(length, tau, budget)
            reward = -1.0 if over else reward  # the budget overrides correctness (Kimi K3)
            told |= {"tau": tau, "budget": budget, "over_budget": float(over)}
        return {"reward_score": reward, "reward_extra_info": told | {"earned": reward}}

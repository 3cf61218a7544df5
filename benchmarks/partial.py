"""What partial rollouts save: decoding steps of a stage's rollouts and how full they were, against plain rollouts.

A model made at random, whose completions end with a probability of about 1 / 49 a token: lengths have a long tail. Its
weights do not change, so both ways write the same completions to the same prompts. A decoding step of a real model
takes nearly as long for one row as for dozens, for its weights are read once for all of them: steps are the cost, and
tokens read (prompts, and what waited, again) are the price. Not measured: what older samples are worth to the learner.
Run: python benchmarks/partial.py
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import yaml
from torch import Tensor

from opdctl.engine.checkpoint import new_policy
from opdctl.engine.loop import Trainer
from opdctl.engine.partial import PartialRollouts
from opdctl.engine.policy import Cache
from opdctl.engine.qwen3 import Qwen3Policy
from opdctl.engine.rows import Mixer, Renderer, roll
from opdctl.engine.sampling import sample
from opdctl.settings import ChainTask, NewModel, RlvrSettings
from opdctl.tasks import load_task

MODEL = Path(__file__).parents[1] / "conf/model/tiny_qwen3.yaml"
BATCHES, COMPLETIONS, LIMIT = 12, 64, 480
FEW = 0.25  # of a batch's completions


@dataclass
class Cost:
    rows: list[int] = field(default_factory=list)  # of each decoding step
    read: int = 0  # tokens
    seconds: float = 0.0
    longest_wait: float = 0.0  # batches

    def shown(self) -> str:
        few = sum(rows < FEW * COMPLETIONS for rows in self.rows)
        return (
            f"{len(self.rows):5d} steps, {few:4d} with less than {FEW:.0%} of {COMPLETIONS} rows, "
            f"{sum(self.rows) / len(self.rows):4.1f} rows on average; {self.read:6d} tokens read; "
            f"{self.seconds:4.1f} s of CPU; longest wait {self.longest_wait:.0f} batches"
        )


class CountingPolicy(Qwen3Policy):
    """Notes what it is asked for."""

    cost = Cost()

    def prefill(self, prompts_BP: Tensor, lengths_B: Tensor, max_new: int) -> tuple[Tensor, Cache]:
        self.cost.read += int(lengths_B.sum())
        return super().prefill(prompts_BP, lengths_B, max_new)

    def decode(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        self.cost.rows.append(len(tokens_B))
        return super().decode(tokens_B, cache)


class Stage:
    """The rollouts of an rlvr stage."""

    def __init__(self, group_size: int, done_fraction: float) -> None:
        tree: dict[str, Any] = yaml.safe_load(MODEL.read_text())
        tree["shape"] |= {"max_position_embeddings": LIMIT + 16}
        policy, tokenizer = new_policy(NewModel.model_validate(tree), seed=0)
        policy.__class__ = CountingPolicy
        self.policy = cast(CountingPolicy, policy)
        rollout = {
            "prompts": COMPLETIONS // group_size,
            "group_size": group_size,
            "max_prompt_tokens": 12,
            "max_completion_tokens": LIMIT,
            "partial": {"done_fraction": done_fraction, "max_staleness": 4},
        }
        given = {
            "data": {"tasks": ["math"]},
            "rollout": rollout,
            "train": {"max_steps": BATCHES, "global_batch_size": COMPLETIONS, "optimizer": {"lr": 1e-3}},
            "mismatch": {"rule": "tis", "cap": 2.0},
        }
        self.settings = RlvrSettings.model_validate(given)
        task = ChainTask.model_validate({"task": "chain", "domain": "math", "strides": {"max": 1}})
        self.mixer = Mixer({"math": load_task("math", task, None)}, self.settings.data, "train", 0)
        self.renderer = Renderer(tokenizer, policy.eos_ids)

    def plain(self) -> Cost:
        options = self.settings.rollout
        with self._measured() as cost:
            for batch in range(BATCHES):
                rows = self.mixer.rows(batch * options.prompts, options.prompts)
                generate = partial(sample, self.policy)
                roll(generate, self.renderer, rows, options, seed=0, group_size=options.group_size)
        return cost

    def waiting(self) -> Cost:
        trainer = SimpleNamespace(policy=self.policy, step=0, position={}, extra={}, journal=None)
        rollouts = PartialRollouts(self.settings, cast(Trainer, trainer), self.mixer, self.renderer, seed=0)
        with self._measured() as cost:
            for _ in range(BATCHES):
                cost.longest_wait = max(cost.longest_wait, rollouts.collect().metrics["staleness_max"])
                trainer.step += 1
        return cost

    @contextmanager
    def _measured(self) -> Iterator[Cost]:
        self.policy.cost = cost = Cost()
        began = time.process_time()
        yield cost
        cost.seconds = time.process_time() - began


def compare(group_size: int, done_fraction: float) -> None:
    stage = Stage(group_size, done_fraction)
    print(f"{BATCHES} batches of {COMPLETIONS // group_size} x {group_size}, done_fraction {done_fraction}")
    ways: dict[str, Callable[[], Cost]] = {"plain": stage.plain, "partial": stage.waiting}
    costs = {name: way() for name, way in ways.items()}
    for name, cost in costs.items():
        print(f"  {name:8} {cost.shown()}")
    steps = {name: len(cost.rows) for name, cost in costs.items()}
    print(f"  steps, plain / partial: {steps['plain'] / steps['partial']:.2f}")


def main() -> None:
    torch.set_num_threads(1)
    for group_size in (1, 8):
        for done_fraction in (0.5, 0.8, 0.95):
            compare(group_size, done_fraction)


if __name__ == "__main__":
    main()

"""What stages of several kinds share: the optimizer, which prompts they see, how completions are drawn."""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Count, Fraction, NonNegative, Positive, Settings


class Optimizer(Settings):
    """AdamW. `wsd` is warm-up, stable, decay over the last `decay_fraction` of the steps (linear)."""

    lr: Positive
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay_fraction: Fraction = 0.4
    min_lr_ratio: Fraction = 0.0  # the lr at the end over the peak lr
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0


class Lora(Settings):
    """Low-rank adapters: W + alpha / rank * B A, of which A and B are trained. Published merged, the adapter beside it.
    Source: arXiv:2106.09685. No dropout: a policy never drops out."""

    rank: Count
    alpha: Positive
    targets: list[str] = []  # last parts of the names of linear layers; empty: all but the output matrix


class Train(Settings):
    max_steps: Count  # optimizer steps
    global_batch_size: Count  # sequences per optimizer step
    optimizer: Optimizer
    precision: Literal["float32", "bfloat16"] = "float32"  # of the weights while training and as published
    save_every: Count = 20  # optimizer steps between two saves of the recovery state
    lora: Lora | None = None


class Mixture(Settings):
    """Which prompts a stage sees: tasks by their name under `tasks`, each at each effort in turn."""

    tasks: Annotated[list[str], Field(min_length=1)]
    efforts: list[str] = []  # repeats weigh: [low, low, max]; empty: prompts ask for no effort
    ratios: dict[str, Count] = {}  # task -> its share of the rows, as a whole number; 1 where absent
    distinct: Count | None = None  # prompts of a task and effort, used again and again; absent: as many as there are


class Turns(Settings):
    """Of tasks with an environment; others are answered at once. `rollout.max_completion_tokens` bounds all turns,
    observations included."""

    max_turns: Annotated[int, Field(ge=1, le=256)]  # that the model writes; the environment answers between them
    max_turn_tokens: Count  # of one turn of the model
    max_observation_tokens: Count  # a longer observation is cut, and says so


class Partial(Settings):
    """Partial rollouts: once `done_fraction` of a batch's completions have ended, the others wait, and are continued
    first in the next batch. Source: Kimi k1.5, arXiv:2501.12599, section 2.6."""

    done_fraction: Annotated[float, Field(gt=0, lt=1)]
    max_staleness: Count  # batches that a completion may wait; then it is drawn to its end


class Journal(Settings):
    """Write-ahead log of a rollout phase: a killed one goes on with its unfinished completions."""

    every_tokens: Count  # between two entries; caches are built anew at each


class Rollout(Settings):
    prompts: Count  # prompts per rollout batch
    group_size: Count = 1  # completions per prompt
    max_prompt_tokens: Count  # a longer prompt is refused, never cut
    max_completion_tokens: Count
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off
    turns: Turns | None = None
    partial: Partial | None = None
    journal: Journal | None = None


class OnPolicy(Settings):
    """What RL and on-policy distillation have in common."""

    data: Mixture
    rollout: Rollout
    train: Train

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout batch, which `checks.py` has divide it."""
        return self.rollout.prompts * self.rollout.group_size // self.train.global_batch_size


class Budget(Settings):
    """b0(x): a per-prompt token budget from the cold-start model's own answers. The estimator is undisclosed."""

    samples: Count  # completions of the cold-start model per prompt
    percentile: Annotated[float, Field(ge=0, le=100)]  # of their lengths, in tokens with EOS
    over: Literal["finished", "correct"]  # `correct` falls back to the finished ones where none is correct
    effort: str  # level at which the cold-start model answers

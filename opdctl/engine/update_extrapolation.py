"""EffOPD: at some steps the latest update is stretched, and kept where held-out prompts are not answered worse."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from opdctl.engine.loop import Metrics, Trainer, completions_per_call, mean, open_tasks
from opdctl.engine.rows import Mixer, Renderer, judge, roll, stream_seed
from opdctl.engine.sampling import sample
from opdctl.errors import StageRefused
from opdctl.settings import OpdSettings, UpdateExtrapolation

_BASE = "base."


class Extrapolation:
    """After the optimizer steps of `settings.steps`, candidates theta_base + s * (theta - theta_base) are scored, s in
    the order of `settings.scales`, until one scores worse than the best before it; the last one that did not is kept,
    theta itself (s = 1) where the first is worse.

    theta_base are the weights at the previous of these steps, as they were kept then; before the first, the initial
    ones. All candidates of a step start from the same theta_base and theta: they are not chained. Weights alone
    change (of low-precision weights the float32 masters), the optimizer's moments do not.
    theta_base is in the trainer's recovery state. Source: EffOPD, arXiv 2605.11739, which tries s = 2^k at the steps
    1, 2, 4, 8 ... with 50 held-out examples.
    """

    def __init__(self, settings: UpdateExtrapolation, trainer: Trainer, score: Callable[[], float]) -> None:
        """`score()` is how well `trainer.policy`, as it is, answers; the same weights must score the same."""
        self._settings, self._trainer, self._score = settings, trainer, score
        if trainer.step == 0:
            self._set_base()

    def _set_base(self) -> None:
        weights = self._trainer.optimizer.weights()
        self._trainer.extra |= {_BASE + name: weight.clone() for name, weight in weights.items()}

    def after_update(self) -> Metrics:
        """Call after every optimizer step. What was tried and kept; empty where the step is none to extrapolate at."""
        if self._trainer.step not in self._settings.steps:
            return {}
        own = {name: weight.clone() for name, weight in self._trainer.optimizer.weights().items()}
        before = best = self._score()
        kept, tried = 1.0, 1
        for scale in self._settings.scales:
            self._put(own, scale)
            tried += 1
            score = self._score()
            if score < best:
                break
            best, kept = score, scale
        self._put(own, kept)
        self._set_base()
        return {
            "extrapolation_scale": kept,
            "extrapolation_before": before,
            "extrapolation_after": best,
            "extrapolation_prompts": float(tried * self._settings.prompts),
        }

    @torch.no_grad()
    def _put(self, own: dict[str, Tensor], scale: float) -> None:
        for name, weight in self._trainer.optimizer.weights().items():
            weight.copy_(own[name])
            if scale != 1.0:  # own weights are put back as they were, to the bit
                base = self._trainer.extra[_BASE + name].to(weight)
                weight.sub_(base).mul_(scale).add_(base)
        self._trainer.optimizer.publish_masters()


def held_out_accuracy(settings: OpdSettings, trainer: Trainer, prompts: int) -> Callable[[], float]:
    """A function that gives the share of held-out prompts which the trainer's policy, as it is then, answers rightly
    and to the end. Problems and random numbers are the same at every call, so scores are paired; what is sampled
    counts to the stage's cost.
    """
    spec, policy = trainer.spec, trainer.policy
    tasks = open_tasks(spec)
    mixer = Mixer(tasks, settings.data, "eval", stream_seed(spec.seed, "extrapolation"))
    for cell, (task, _) in enumerate(mixer.cells):
        size, wanted = tasks[task].size("eval"), len(mixer.dealt(cell, 0, prompts))
        if size is not None and size < wanted:
            raise StageRefused(
                f"task {task} has {size} held-out rows and config.extrapolation.prompts asks for {wanted} of them",
                hint="lower config.extrapolation.prompts, or hold out more rows",
            )
    rows = mixer.rows(0, prompts)
    renderer = Renderer(trainer.tokenizer, policy.eos_ids)
    seed = stream_seed(spec.seed, "extrapolation-sample")
    at_once = completions_per_call(spec, settings.rollout)

    def accuracy() -> float:
        right: list[float] = []
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            generate = partial(sample, policy)
            _, rollout = roll(generate, renderer, part, settings.rollout, seed=seed, group_size=1)
            verdicts = judge(tasks, part, renderer.texts(rollout.completions), 1, rollout.episodes)
            right += [float(v.correct and ended) for v, ended in zip(verdicts, rollout.finished, strict=True)]
            spent = {"tokens": sum(rollout.counted), "held_out": len(part)}
            for name, more in spent.items():
                trainer.position[name] = trainer.position.get(name, 0) + more
        return mean(right)

    return accuracy

"""What a rollout batch earned, among verl's metrics: verl keeps what a reward manager reports, and logs none of it."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from types import ModuleType
from typing import Any

from opdctl.backends.verl.plugin.imports import when_imported

PREFIX = "opdctl/"  # a metric under it is opdctl's own, of this name


def install() -> None:
    """Takes effect in the process that logs."""
    when_imported("verl.trainer.ppo.v1.trainer_base", _log_rewards)


def _log_rewards(trainer_base: ModuleType) -> None:
    trainer, queue = trainer_base.PPOTrainer, trainer_base.tq
    compute = trainer._compute_metrics

    def _compute_metrics(self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        compute(self, batch, metrics, *args, **kwargs)
        real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        found = queue.kv_batch_get(keys=real, partition_id=batch.partition_id, select_fields=["extra_fields"])
        told = found.pop("extra_fields").tolist()
        reported = [fields["reward_extra_info"] for fields in told]
        # a key is PROMPT_SAMPLE_TURN
        named = batch_metrics(reported, [key.rsplit("_", 2)[0] for key in real])
        named |= episodes_metrics([counts for fields in told if (counts := fields.get("episode"))])
        metrics.update({PREFIX + name: value for name, value in named.items()})

    trainer._compute_metrics = _compute_metrics


def episodes_metrics(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """As the embedded engine describes the episodes of a batch by their counts; {} of none."""
    from opdctl.engine.episodes import describe_episodes, totals

    return describe_episodes(totals(counts), len(counts)) if counts else {}


def batch_metrics(reported: Sequence[Mapping[str, float]], prompts: Sequence[str]) -> dict[str, float]:
    """opdctl's metrics of a rollout batch; `reported` as by `rewards.Earned`, `prompts` names each one's prompt."""
    earned: dict[str, set[float]] = {}
    for prompt, report in zip(prompts, reported, strict=True):
        earned.setdefault(prompt, set()).add(report["earned"])
    means = {name: fmean(report[name] for report in reported) for name in reported[0]}
    return {
        "reward": means.pop("earned"),
        "truncated": 1.0 - means.pop("finished"),
        "tied_groups": fmean(len(rewards) == 1 for rewards in earned.values()),
        **means,
    }

"""Supervised fine-tuning: cross-entropy on the completions of demonstrations; of episodes on what the model writes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from opdctl.backends.contract import Control, StageResult, StageSpec
from opdctl.engine.batch import Sequence, TokenBatch, micro_batches
from opdctl.engine.loop import Metrics, Trainer, open_demonstrations, open_policy, role
from opdctl.engine.losses import aggregate
from opdctl.engine.rows import Mixer, Renderer, stream_seed
from opdctl.engine.vocab import token_logprobs
from opdctl.errors import StageRefused
from opdctl.settings import SftSettings


def run(spec: StageSpec, control: Control) -> StageResult:
    """Minimise -mean over completion tokens of log pi(y_t | x, y_<t), demonstrations dealt evenly over the tasks."""
    settings = SftSettings.model_validate(spec.config)
    policy, tokenizer = open_policy(spec, role(spec, "init")[0], settings.train.precision)
    trainer = Trainer(spec, control, settings.train, policy, tokenizer)
    mixer = Mixer(open_demonstrations(spec), settings.data, "train", stream_seed(spec.seed, "sft"))
    renderer = Renderer(tokenizer, policy.eos_ids)
    batch_size, budget = settings.train.global_batch_size, int(spec.resources["micro_batch_tokens"])

    def iteration(step: int) -> Metrics:
        sequences = _sequences(mixer, renderer, step * batch_size, batch_size, settings.max_tokens)
        total = sum(sequence.counted for sequence in sequences)
        entropies: list[torch.Tensor] = []

        def losses() -> Iterator[tuple[Tensor, TokenBatch]]:
            for part in micro_batches(sequences, budget):
                batch = policy.batch([sequences[i] for i in part])
                logprobs_N, entropy_N = token_logprobs(policy.hidden(batch), policy.head(), batch.targets_N)
                entropies.append(entropy_N)
                yield (
                    aggregate(
                        -logprobs_N,
                        batch.sequence_N,
                        how="token_mean",
                        total_tokens=total,
                        total_sequences=len(sequences),
                    ),
                    batch,
                )

        metrics = trainer.update(losses())
        return {**metrics, "entropy": float(torch.cat(entropies).mean()), "tokens": float(total)}

    return trainer.fit(iteration)


def _sequences(mixer: Mixer, renderer: Renderer, start: int, count: int, max_tokens: int) -> list[Sequence]:
    shown = [demonstration for _, demonstration in mixer.demonstrations(start, count)]
    prompts = renderer.prompts([demonstration.prompt for demonstration in shown], max_tokens)
    completions = renderer.demonstrations(shown, max_tokens)
    for prompt, (completion, _) in zip(prompts, completions, strict=True):
        if len(prompt) + len(completion) > max_tokens:
            raise StageRefused(
                f"a demonstration has {len(prompt) + len(completion)} tokens and config.max_tokens is {max_tokens}",
                hint="raise config.max_tokens, or drop such rows: a cut answer teaches to stop in the middle",
            )
    return bucketed(
        [
            Sequence(tuple(prompt), tuple(completion), demonstration.prompt.group, learned)
            for prompt, (completion, learned), demonstration in zip(prompts, completions, shown, strict=True)
        ]
    )


def bucketed(sequences: list[Sequence]) -> list[Sequence]:
    """The sequences from short to long, so that micro-batches pad little; groups stay side by side."""
    lengths = [len(sequence.prompt) + len(sequence.completion) for sequence in sequences]
    longest: dict[int, int] = {}
    for sequence, length in zip(sequences, lengths, strict=True):
        longest[sequence.group] = max(length, longest.get(sequence.group, 0))
    # group 0 shares nothing: each of its sequences goes by its own length
    keys = [longest[s.group] if s.group else length for s, length in zip(sequences, lengths, strict=True)]
    return [sequences[i] for i in sorted(range(len(sequences)), key=keys.__getitem__)]

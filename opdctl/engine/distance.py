"""How far models are from their teachers on fixed sequences: the same for every model, so the numbers compare."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from opdctl.backends.contract import Control, InputSpec, StageSpec, Stopped
from opdctl.engine.batch import Sequence, micro_batches
from opdctl.engine.loop import open_frozen, open_vocabulary, role
from opdctl.engine.policy import Policy
from opdctl.engine.teachers import accepted, check_vocabularies
from opdctl.engine.vocab import full_vocab_reverse_kl


@dataclass(frozen=True)
class Asked:
    """A cell of the evaluation."""

    name: str
    teacher: InputSpec
    sequences: Items[Sequence]


def check_comparable(spec: StageSpec) -> None:
    """Raises StageRefused unless the students and their teachers have one vocabulary."""
    [before], others = role(spec, "before"), [*role(spec, "teachers"), *role(spec, "after")]
    tokenizer, _, width = open_vocabulary(spec, before)
    check_vocabularies(tokenizer, width, others, accepted=accepted(spec))


def divergences(
    spec: StageSpec, control: Control, models: Items[InputSpec], cells: Items[Asked], precision: str
) -> dict[str, dict[str, float]]:
    """Model -> cell -> mean over the tokens of KL(model || teacher) in nats, the whole vocabulary summed.

    One model and one teacher are in memory at a time.
    """
    found: dict[str, dict[str, float]] = {model.label: {} for model in models}
    budget = int(spec.resources["micro_batch_tokens"])
    for path in dict.fromkeys(cell.teacher.path for cell in cells):
        own = [cell for cell in cells if cell.teacher.path == path]
        teacher = open_frozen(spec, own[0].teacher, precision)
        for model in models:
            if control.stop_requested():
                raise Stopped
            policy = open_frozen(spec, model, precision)
            found[model.label] |= {cell.name: mean_divergence(policy, teacher, cell.sequences, budget) for cell in own}
            del policy  # before the next one is loaded
        del teacher
    return {label: {cell.name: of[cell.name] for cell in cells} for label, of in found.items()}


@torch.no_grad()
def mean_divergence(policy: Policy, teacher: Policy, sequences: Items[Sequence], micro_batch_tokens: int) -> float:
    """Mean over the sequences' tokens of KL(policy || teacher) in nats."""
    total, tokens = 0.0, 0
    for part in micro_batches(sequences, micro_batch_tokens):
        chosen = [sequences[i] for i in part]
        batch = policy.batch(chosen)
        theirs = teacher.hidden(teacher.batch(chosen))
        _, values = full_vocab_reverse_kl(policy.hidden(batch), policy.head(), theirs, teacher.head())
        total += float(values["reverse_kl"].double().sum())
        tokens += len(batch.targets_N)
    return total / tokens

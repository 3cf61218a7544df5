"""What a backend cannot do, as sentences that say which one can: asked for every stage before launch."""

from collections.abc import Iterator, Sequence

from opdctl.references import Input, Problem
from opdctl.settings import (
    EvalStage,
    FullVocabOpd,
    OpdSettings,
    OpdStage,
    PipelineSettings,
    RlvrStage,
    SftStage,
)

AnyStage = SftStage | RlvrStage | OpdStage | EvalStage


def missing(settings: AnyStage, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    """Key and sentence of everything that the stage asks of its backend in vain."""
    match settings.backend:
        case "verl":
            yield from _verl(settings)
        case "vllm" if not isinstance(settings, EvalStage):
            yield "backend", f"vllm generates only: kind {settings.kind} needs backend: embedded or verl"
    if settings.verl and settings.backend != "verl":
        yield "verl", f"raw overrides are for backend: verl, and this stage has backend: {settings.backend}"


def _verl(settings: AnyStage) -> Iterator[Problem]:
    if isinstance(settings, EvalStage):
        yield "backend", "verl trains only: kind eval needs backend: vllm or embedded"
    if isinstance(settings.config, OpdSettings) and isinstance(settings.config.loss, FullVocabOpd):
        yield (
            "config.loss.form",
            "full_vocab needs all of a teacher's logits, and verl's served teachers give their top k: "
            "backend: embedded computes it, or take form: topk",
        )

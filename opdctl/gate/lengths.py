"""Has every model room for what a stage makes of it?"""

from collections.abc import Iterator, Sequence

from opdctl.backends.contract import StageSpec
from opdctl.gate.pairs import Party
from opdctl.gate.rows import longest_prompt
from opdctl.verdicts import Outcome, Verdict


def check_context(spec: StageSpec, models: Sequence[Party]) -> Iterator[Verdict]:
    """Prompt + response of the rollout's limits, and in verl one token more: its servers write one even when they are
    asked for the log-probabilities of a text alone (open-instruct#1740), and are started for the limits.

    Elsewhere `max_prompt_tokens` only refuses longer prompts, and may be above what a model holds: there prompts that
    the stage will read count, by their words, of which no tokenizer makes fewer tokens. A model stretched by its
    configuration (yarn) has its full length in verl, which leaves that to vLLM; elsewhere max_position_embeddings is
    the end. SFT and its `max_tokens` are left out: it only refuses longer rows.
    """
    rollout = spec.config.get("rollout")
    if not rollout:
        return
    prompt, completion = int(rollout["max_prompt_tokens"]), int(rollout["max_completion_tokens"])
    more, told = (1, " + 1") if spec.backend == "verl" else (0, "")
    told = f"prompt {prompt:,} + completion {completion:,}{told}"
    longest: int | None = None
    for party in models:
        positions = party.files.positions(scaled=spec.backend == "verl")
        if positions is None:
            continue
        evidence, needed = told, prompt + completion + more
        if needed > positions and spec.backend != "verl":
            longest = longest_prompt(spec) if longest is None else longest
            needed = longest + completion
            evidence = f"the longest prompt looked at, {longest:,} words, + completion {completion:,}"
        values = {"needed": float(needed), "positions": float(positions)}
        if needed > positions:
            evidence += f" = {needed:,} tokens, and {party.role} has max_position_embeddings {positions:,}"
            remedy = f"lower the limits of the rollout by {needed - positions:,} in all, or take a model with more"
            yield Verdict("context", party.label, Outcome.REFUSE, evidence, remedy, values)
        else:
            yield Verdict(
                "context", party.label, Outcome.GO, f"{evidence} = {needed:,} of {positions:,} tokens", values=values
            )

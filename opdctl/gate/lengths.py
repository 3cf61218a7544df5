"""Has every model room for what a stage makes of it? Does the stage take prompts as long as those of its tasks?"""

from collections.abc import Iterator, Mapping, Sequence

from opdctl.backends.contract import StageSpec
from opdctl.data.check import text_of
from opdctl.gate.pairs import Party
from opdctl.gate.rows import first_prompts
from opdctl.tasks import Prompt
from opdctl.verdicts import Outcome, Verdict

COUNTED = 64  # prompts of a task whose tokens are counted, the longest
LISTENING = ("teachers", "reference", "budget")  # roles that are shown what another model was asked


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
    prompts = first_prompts(spec)
    yield from _too_long(prompts, prompt, models)
    for party in models:
        positions = party.files.positions(scaled=spec.backend == "verl")
        if positions is None:
            continue
        evidence, needed = told, prompt + completion + more
        if needed > positions and spec.backend != "verl":
            longest = max((len(text_of(one).split()) for asked in prompts.values() for one in asked), default=1)
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


def _too_long(prompts: Mapping[str, Sequence[Prompt]], limit: int, models: Sequence[Party]) -> Iterator[Verdict]:
    """A longer prompt fails the stage when it is drawn, which may be hours from now.

    By the tokenizer of the first model that is asked, where its files tell it; that is opened only for prompts of more
    bytes than `limit`, for no token is shorter than a byte, and a large vocabulary takes a second. What a chat template
    puts around the messages is not counted: the stage refuses what that alone makes too long.
    """
    files = next((party.files for party in models if party.given.role not in LISTENING), None)
    for name, asked in prompts.items():
        long = sorted((one for one in asked if _bytes(one) > limit), key=_bytes)[-COUNTED:]
        counts = [sum(files.tokens(_texts(one)) or []) for one in long] if files is not None else []
        longest = max(counts, default=0)
        if longest > limit:
            prompt = long[counts.index(longest)]
            yield Verdict(
                "context",
                f"task {name}",
                Outcome.REFUSE,
                f"the longest of {len(asked):,} prompts looked at has {'at least ' if prompt.messages else ''}"
                f"{longest:,} tokens, and config.rollout.max_prompt_tokens is {limit:,}: {text_of(prompt)[:60]!r}",
                f"raise config.rollout.max_prompt_tokens{' above' if prompt.messages else ' to'} {longest:,}, or drop "
                "such rows from the data: a cut prompt asks another question",
                {"longest": float(longest), "limit": float(limit)},
            )


def _texts(prompt: Prompt) -> list[str]:
    return [message["content"].strip() for message in prompt.messages] or [prompt.text]


def _bytes(prompt: Prompt) -> int:
    return sum(len(text.encode(errors="replace")) for text in _texts(prompt))

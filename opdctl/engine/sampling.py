"""Batches of completions: how they are drawn, paused and continued, and the exact probabilities of what was drawn.

Legend: B completions, T steps, N tokens of all completions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from opdctl.engine.batch import Sequence as Tokens
from opdctl.engine.decoding import Distribution, Part, draw, uniforms
from opdctl.engine.policy import Policy
from opdctl.errors import OpdctlError
from opdctl.tasks import Verdict


@dataclass(frozen=True)
class Episode:
    """What came of several turns in an environment."""

    verdict: Verdict
    counts: Mapping[str, float]  # turns, observation_tokens, and what the environment counts


@dataclass(frozen=True)
class Completions:
    """Prompt-major; the N axis is the concatenation of the tokens that the model wrote."""

    completions: list[list[int]]  # the EOS token included
    finished: list[bool]  # ended by EOS, an episode by its environment; not by a limit
    sampling_logprobs_N: Tensor  # float32: under the distribution the token was drawn from
    learned: list[tuple[bool, ...] | None] = field(default_factory=list, kw_only=True)  # as Sequence's; empty: all None
    episodes: list[Episode | None] = field(default_factory=list, kw_only=True)  # None: one turn; empty: all None

    @property
    def counted(self) -> list[int]:
        """Of each completion the tokens that the model wrote."""
        masks = self.learned or [None] * len(self.completions)
        return [len(ids) if own is None else sum(own) for ids, own in zip(self.completions, masks, strict=True)]

    def sequence(self, i: int, prompt: Sequence[int], group: int) -> Tokens:
        """Completion i after its prompt, for a batch."""
        return Tokens(tuple(prompt), tuple(self.completions[i]), group, self.learned[i] if self.learned else None)


@dataclass(frozen=True)
class Rollout(Completions):
    entropy_N: Tensor  # float32, nats: of the distribution the token was drawn from


Drawn = TypeVar("Drawn", bound=Completions)
Drawn_co = TypeVar("Drawn_co", bound=Completions, covariant=True)


class Generate(Protocol[Drawn_co]):
    """A model that draws completions: `sample` with its policy given, or another engine in its place.

    `group_size` completions for every prompt; those of a prompt depend on the seed and the prompt's key, never on the
    other prompts.
    """

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        max_completion_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        keys: Sequence[int],
    ) -> Drawn_co: ...


def gather(
    calls: Sequence[Drawn],
    picks: Sequence[Sequence[tuple[int, int]]],
    *,
    completions: list[list[int]],
    finished: list[bool],
    learned: list[tuple[bool, ...] | None],
    episodes: list[Episode | None],
) -> Drawn:
    """Completions put together from pieces of several calls: what the model wrote of completion i are the completions
    `picks[i]`, each (number of a call, number of a completion in it), one after another."""
    counted = [call.counted for call in calls]
    tensors: dict[str, Tensor] = {}
    for name in (own.name for own in fields(calls[0]) if own.name.endswith("_N")):
        pieces = [getattr(call, name).split(lengths) for call, lengths in zip(calls, counted, strict=True)]
        tensors[name] = torch.cat([pieces[call][i] for parts in picks for call, i in parts])
    return replace(calls[0], completions=completions, finished=finished, learned=learned, episodes=episodes, **tensors)


def merged(calls: Sequence[Drawn], order: Sequence[int]) -> Drawn:
    """The completions of several calls as those of one: the next one is the next of call `order[i]`."""
    following = [count() for _ in calls]
    places = [(call, next(following[call])) for call in order]
    return gather(
        calls,
        [[place] for place in places],
        completions=[calls[call].completions[i] for call, i in places],
        finished=[calls[call].finished[i] for call, i in places],
        learned=[calls[call].learned[i] if calls[call].learned else None for call, i in places],
        episodes=[calls[call].episodes[i] if calls[call].episodes else None for call, i in places],
    )


@dataclass
class Draft:
    """A completion being written."""

    prompt: Sequence[int]  # the same object for the samples of a prompt, which then share its reading
    key: int
    sample: int  # its number in the group: with key and seed it names the random numbers of its tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)  # together float32 [tokens]: as they were drawn
    entropies: list[Tensor] = field(default_factory=list)
    finished: bool = False  # by EOS

    def extend(self, tokens: Sequence[int], logprobs_N: Tensor, entropy_N: Tensor, *, finished: bool) -> None:
        self.tokens += tokens
        self.logprobs.append(logprobs_N)
        self.entropies.append(entropy_N)
        self.finished = finished


@dataclass(frozen=True)
class Drawing:
    """How drafts are continued."""

    temperature: float
    top_p: float
    top_k: int
    max_completion_tokens: int
    seed: int
    greedy: bool = False


@dataclass(frozen=True)
class Until:
    """When drafts that go on together pause: as soon as `ended` of them have ended, and all of `pressing`."""

    ended: int
    pressing: Sequence[bool]  # one a draft that has not ended


class Log(Protocol):
    """Where the parts of one call are kept: what a process wrote that was killed, another one goes on from."""

    @property
    def every(self) -> int:
        """Tokens of a part, at most."""

    def parts(self) -> Sequence[Part]:
        """Those that are kept, in their order."""

    def append(self, part: Part) -> None: ...


class Journal(Protocol):
    def log(self, drafts: Sequence[Draft], drawing: Drawing, until: Until | None) -> Log:
        """Of the call that these arguments make: another call's parts are never returned."""


def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    group_size: int,
    max_completion_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    keys: Sequence[int],
    greedy: bool = False,
    journal: Journal | None = None,
) -> Rollout:
    """`group_size` completions for every prompt.

    Token t of sample g of the prompt with key k depends on (seed, k, g, t) and its distribution alone: a
    counter-based uniform number picks it from the cumulative distribution. So neither the order nor the company of
    the prompts changes a rollout. `greedy` takes the most probable token; probabilities and entropy stay those of the
    distribution that would be drawn from.

    Raises OpdctlError for an empty prompt and for more tokens than the policy has positions.
    """
    drafts = [Draft(prompt, key, i) for prompt, key in zip(prompts, keys, strict=True) for i in range(group_size)]
    drawing = Drawing(temperature, top_p, top_k, max_completion_tokens, seed, greedy)
    write(policy, drafts, drawing, journal=journal)
    return collect(drafts, policy.device)


def write(
    policy: Policy,
    drafts: Sequence[Draft],
    drawing: Drawing,
    *,
    until: Until | None = None,
    journal: Journal | None = None,
) -> None:
    """Continue drafts in place, until all have ended or `until` says so.

    With a journal the caches are built anew from the tokens every `every` steps, of the drafts that go on alone and
    in their order, whether anything was interrupted or not: reading a context at once gives other last bits than
    reading it token by token, so only then does a killed call end with the bits of an undisturbed one.
    """
    if not drafts or not all(len(draft.prompt) for draft in drafts):
        raise OpdctlError(
            "generation needs at least one prompt, and every prompt at least one token",
            hint="begin prompts with a begin-of-sequence token, or drop rows without a prompt",
        )
    limit = drawing.max_completion_tokens
    going = [draft for draft in drafts if not draft.finished and len(draft.tokens) < limit]
    log = journal.log(drafts, drawing, until) if journal else None
    kept = list(log.parts()) if log else []
    pressing = dict(zip(map(id, going), until.pressing, strict=True)) if until else {}
    spare = len(going) - until.ended if until else 0
    while going and (len(going) > spare or any(pressing.get(id(draft)) for draft in going)):
        if kept:
            part = kept.pop(0)
        else:
            steps = min([limit - len(draft.tokens) for draft in going] + ([log.every] if log else []))
            part = _part(policy, going, drawing, steps, spare, [pressing.get(id(draft), False) for draft in going])
            if log:
                log.append(part)
        _extend(going, part)
        going = [draft for draft in going if not draft.finished and len(draft.tokens) < limit]


def _extend(drafts: Sequence[Draft], part: Part) -> None:
    lengths = [len(tokens) for tokens in part.completions]
    pieces = part.logprobs_N.split(lengths), part.entropy_N.split(lengths)
    for draft, *written, finished in zip(drafts, part.completions, *pieces, part.finished, strict=True):
        draft.extend(*written, finished=finished)


def collect(drafts: Sequence[Draft], device: torch.device) -> Rollout:
    """What the drafts hold."""
    logprobs_N, entropy_N = (
        torch.cat([piece.to(device) for pieces in columns for piece in pieces] or [torch.zeros(0, device=device)])
        for columns in ([draft.logprobs for draft in drafts], [draft.entropies for draft in drafts])
    )
    return Rollout([draft.tokens for draft in drafts], [draft.finished for draft in drafts], logprobs_N, entropy_N)


def _part(
    policy: Policy, drafts: Sequence[Draft], drawing: Drawing, steps: int, spare: int, pressing: Sequence[bool]
) -> Part:
    """`draw` for drafts that go on."""
    uniforms_BT = None
    if not drawing.greedy:
        named = [draft.key for draft in drafts], [draft.sample for draft in drafts]
        numbers_BT = uniforms(drawing.seed, *named, [len(draft.tokens) for draft in drafts], steps)
        uniforms_BT = torch.from_numpy(numbers_BT).to(policy.device)
    distribution = Distribution(drawing.temperature, drawing.top_p, drawing.top_k)
    return draw(policy, *_contexts(drafts), distribution, uniforms_BT, steps, spare=spare, pressing=pressing)


def _contexts(drafts: Sequence[Draft]) -> tuple[list[Sequence[int]], list[int]]:
    """What has to be read, and which of it each draft goes on from: neighbours that begin one prompt share it."""
    contexts: list[Sequence[int]] = []
    context_B: list[int] = []
    for before, draft in zip([None, *drafts], drafts, strict=False):
        shared = (
            before is not None
            and before.prompt is draft.prompt
            and before.sample + 1 == draft.sample
            and not (before.tokens or draft.tokens)
        )
        if not shared:
            contexts.append([*draft.prompt, *draft.tokens])
        context_B.append(len(contexts) - 1)
    return contexts, context_B

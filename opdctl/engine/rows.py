"""From tasks to token ids and back: which prompts a step sees, how they are rendered, how completions are judged."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from opdctl.engine.chat import observation_ids, prompt_text
from opdctl.engine.checkpoint import Tokenizer, encode_batch
from opdctl.engine.episodes import Start, play
from opdctl.engine.sampling import Drawn, Episode, Generate, merged
from opdctl.errors import StageRefused
from opdctl.settings import Mixture
from opdctl.settings import Rollout as RolloutSettings
from opdctl.tasks import Demonstration, Prompt, Split, Task, Verdict, verify_all
from opdctl.tasks.call_formats import call_format
from opdctl.tasks.environment import CallFormat, EnvironmentTask


def stream_seed(seed: int, *parts: object) -> int:
    """A seed of its own for a stream of rows or random numbers, the same on every machine."""
    return zlib.crc32(":".join(map(str, (seed, *parts))).encode())


@dataclass(frozen=True)
class Row:
    """One prompt of a mixture, with what is needed to judge and to route its completions."""

    task: str
    prompt: Prompt
    index: int  # of the cell's stream; the same index is the same problem at every effort of one `cell`
    cell: int  # which (task, effort) of the mixture
    environment: EnvironmentTask | None = None  # plays its completions in turns

    @property
    def key(self) -> int:
        """Names the row in counter-based random numbers: different for all rows of a mixture."""
        return self.index * 4096 + self.cell


class Deal:
    """Deals rows to hands, `shares[i]` to hand i in every turn of sum(shares) rows, as evenly as whole rows can be.

    Which hand a row goes to depends on its number alone.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.turn = sum(shares)
        # share k of s lies at (2k + 1) / 2s of the turn: a hand's rows come evenly spaced, not in a lump
        order = sorted(
            ((Fraction(2 * k + 1, 2 * share), hand) for hand, share in enumerate(shares) for k in range(share))
        )
        self._places = [[at for at, (_, dealt) in enumerate(order) if dealt == hand] for hand in range(len(shares))]

    def before(self, hand: int, row: int) -> int:
        """How many of the rows 0 .. row-1 go to the hand. A turn's last place is dealt first."""
        return sum((row + place) // self.turn for place in self._places[hand])


class Mixer:
    """Deals a mixture's prompts over its cells (task x effort), each task its share of them, ordered by cell.

    Rows start .. start+count-1 depend on the mixture, the seed and their numbers alone.
    """

    def __init__(self, tasks: dict[str, Task], mixture: Mixture, split: Split, seed: int) -> None:
        self.tasks, self.split, self.seed = tasks, split, seed
        efforts: Sequence[str | None] = mixture.efforts or [None]
        self.mixture = mixture
        self.cells = [(task, effort) for task in mixture.tasks for effort in efforts]
        self._cell_deal = Deal([mixture.ratios.get(task, 1) for task, _ in self.cells])
        self._task_deal = Deal([mixture.ratios.get(task, 1) for task in mixture.tasks])

    def rows(self, start: int, count: int) -> list[Row]:
        rows: list[Row] = []
        for cell in range(len(self.cells)):
            dealt = self.dealt(cell, start, count)
            rows += self.cell_rows(cell, dealt.start, len(dealt))
        return rows

    def dealt(self, cell: int, start: int, count: int) -> range:
        """Of rows start .. start+count-1 those that the cell gets, by their numbers in its own stream."""
        return range(self._cell_deal.before(cell, start), self._cell_deal.before(cell, start + count))

    def cell_rows(self, cell: int, first: int, count: int, effort: str | None = None) -> list[Row]:
        """`count` rows of one cell's stream; with `effort` the same problems asked at another effort."""
        if count == 0:
            return []
        task, own = self.cells[cell]
        stream, asked, distinct = self.stream(cell), effort or own, self.mixture.distinct
        if distinct is None or self.split == "eval":
            prompts = self.tasks[task].prompts(self.split, stream, first, count, asked)
        else:
            few = self.tasks[task].prompts(self.split, stream, 0, distinct, asked)
            prompts = [few[i % distinct] for i in range(first, first + count)]
        played = self.tasks[task]
        environment = played if isinstance(played, EnvironmentTask) else None
        return [Row(task, prompt, first + i, cell, environment) for i, prompt in enumerate(prompts)]

    def stream(self, cell: int) -> int:
        """Seed of a cell's problems: evaluation asks the same ones at every effort, training as many as it can."""
        return self.seed if self.split == "eval" else stream_seed(self.seed, self.cells[cell][1])

    def demonstrations(self, start: int, count: int) -> list[tuple[str, Demonstration]]:
        """Rows start .. start+count-1 of the training split with answers, dealt over the tasks by their shares."""
        dealt: list[tuple[str, Demonstration]] = []
        for number, name in enumerate(self.mixture.tasks):
            first, last = (self._task_deal.before(number, at) for at in (start, start + count))
            shown = self.tasks[name].demonstrations(self.seed, first, last - first, self.mixture.efforts)
            dealt += [(name, demonstration) for demonstration in shown]
        return dealt


class Renderer:
    """Prompts, completions and episodes as token ids. A prompt that is too long is refused, never cut."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.eos_id = eos_ids[0]
        # few differ where environments are small, and rendering one anew takes longer than all else of a turn
        self.observation = lru_cache(maxsize=4096)(self._observation)

    @cached_property
    def calls(self) -> CallFormat:
        """How the model writes calls of tools."""
        return call_format(self.tokenizer.chat_template)

    def prompts(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        ids = encode_batch(self.tokenizer, [self.text(prompt) for prompt in prompts])
        for prompt, tokens in zip(prompts, ids, strict=True):
            if len(tokens) > max_tokens:
                raise StageRefused(
                    f"a prompt has {len(tokens)} tokens and config.rollout.max_prompt_tokens is {max_tokens}: "
                    f"{self.text(prompt)[:80]!r}",
                    hint="raise max_prompt_tokens, or drop such rows from the data: a cut prompt asks another question",
                )
        return ids

    def completions(self, texts: Sequence[str]) -> list[list[int]]:
        """Completions to imitate, each ended by EOS."""
        return [[*ids, self.eos_id] for ids in encode_batch(self.tokenizer, list(texts))]

    def demonstrations(
        self, shown: Sequence[Demonstration], max_observation_tokens: int
    ) -> list[tuple[list[int], tuple[bool, ...] | None]]:
        """Completions to imitate, and which of their tokens: of an episode the turns, None for all."""
        written = [[self.calls.render(turn.text, turn.calls) for turn in one.turns] for one in shown]
        texts = [text for one, turns in zip(shown, written, strict=True) for text in turns or [one.completion]]
        encoded = iter(self.completions(texts))
        found: list[tuple[list[int], tuple[bool, ...] | None]] = []
        for one in shown:
            ids = next(encoded)
            learned = [True] * len(ids)
            for before in one.turns[:-1]:
                observation, turn = self.observation(before.observation, max_observation_tokens), next(encoded)
                ids += [*observation, *turn]
                learned += [False] * len(observation) + [True] * len(turn)
            found.append((ids, tuple(learned) if one.turns else None))
        return found

    def _observation(self, text: str, max_tokens: int) -> tuple[int, ...]:
        """What the model reads between two turns, the first of which it ended itself."""
        return tuple(observation_ids(self.tokenizer, [self.eos_id, *self.eos_ids], text, max_tokens))

    def texts(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """What a verifier reads: the completion without its EOS."""
        bare = [ids[:-1] if ids and ids[-1] in self.eos_ids else ids for ids in completions]
        return [str(text) for text in self.tokenizer.batch_decode(bare, skip_special_tokens=False)]

    def text(self, prompt: Prompt) -> str:
        """What is tokenized: see `prompt_text`."""
        return prompt_text(self.tokenizer, prompt)


def judge(
    tasks: dict[str, Task],
    rows: Sequence[Row],
    texts: Sequence[str],
    group_size: int,
    episodes: Sequence[Episode | None] = (),
) -> list[Verdict]:
    """Verdicts of completions in prompt-major order, `group_size` a row; of episodes those of their environments.

    A task that judges in bulk is asked once for all of its own.
    """
    verdicts = [None if episode is None else episode.verdict for episode in episodes or [None] * len(texts)]
    asked: dict[str, list[int]] = {}
    for i, verdict in enumerate(verdicts):
        if verdict is None:
            asked.setdefault(rows[i // group_size].task, []).append(i)
    for name, numbers in asked.items():
        task, pairs = tasks[name], [(rows[i // group_size].prompt, texts[i]) for i in numbers]
        found = verify_all(task, pairs)
        for i, verdict in zip(numbers, found, strict=True):
            verdicts[i] = verdict
    return [verdict for verdict in verdicts if verdict is not None]


def roll(
    generate: Generate[Drawn],
    renderer: Renderer,
    rows: Sequence[Row],
    options: RolloutSettings,
    *,
    seed: int,
    group_size: int,
) -> tuple[list[list[int]], Drawn]:
    """Prompt ids of the rows, and `group_size` completions for each, prompt-major.

    Rows with an environment are played in turns, the others answered at once.
    """
    prompts = renderer.prompts([row.prompt for row in rows], options.max_prompt_tokens)
    starts = [
        Start(row.prompt, ids, row.environment, row.key, sample)
        for row, ids in zip(rows, prompts, strict=True)
        for sample in range(group_size)
        if row.environment is not None
    ]
    plain = [i for i, row in enumerate(rows) if row.environment is None]
    played = play(generate, renderer, starts, options, seed=seed) if starts else None
    if not plain and played is not None:
        return prompts, played
    drawn = generate(
        [prompts[i] for i in plain],
        group_size=group_size,
        max_completion_tokens=options.max_completion_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=seed,
        keys=[rows[i].key for i in plain],
    )
    if played is None:
        return prompts, drawn
    return prompts, merged(
        [drawn, played], [int(row.environment is not None) for row in rows for _ in range(group_size)]
    )

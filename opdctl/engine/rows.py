"""From tasks to token ids and back: which prompts a step sees, how they are rendered, how completions are judged."""

from collections.abc import Sequence
from functools import cached_property, lru_cache

from opdctl.engine.chat import observation_ids, prompt_text
from opdctl.engine.checkpoint import Tokenizer, encode_batch
from opdctl.engine.episodes import Start, play
from opdctl.engine.sampling import Drawn, Episode, Generate, merged
from opdctl.errors import StageRefused
from opdctl.settings import Rollout as RolloutSettings
from opdctl.tasks import Demonstration, Prompt, Task, Verdict, verify_all
from opdctl.tasks.call_formats import call_format
from opdctl.tasks.environment import CallFormat
from opdctl.tasks.mixer import Deal as Deal
from opdctl.tasks.mixer import Mixer as Mixer
from opdctl.tasks.mixer import Row as Row
from opdctl.tasks.mixer import stream_seed as stream_seed


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

"""Rollouts of several turns: a model and an environment write in turn, over whatever generates.

Token in, token out: what a turn adds to the sequence are the very ids that were sampled. Text is made of them for the
environment alone, and never tokenized again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Protocol

from opdctl.engine.sampling import Drawn, Episode, Generate, gather
from opdctl.errors import StageRefused
from opdctl.settings import Rollout
from opdctl.tasks import Prompt
from opdctl.tasks.environment import CallFormat, Environment, EnvironmentTask, Step

THREADS = 8  # environments that act at the same time: those that run programs wait for the jail
_SAMPLES, _TURNS = 12, 8  # bits of a random number's key that count samples and turns


class Language(Protocol):
    """What episodes ask of a `rows.Renderer`."""

    @property
    def calls(self) -> CallFormat: ...

    @property
    def observation(self) -> Callable[[str, int], Sequence[int]]: ...

    def texts(self, completions: Sequence[Sequence[int]]) -> list[str]: ...


@dataclass(frozen=True)
class Start:
    """An episode to be played."""

    prompt: Prompt
    ids: Sequence[int]  # of the prompt
    task: EnvironmentTask
    key: int  # of its prompt's random numbers
    sample: int

    def turn_key(self, turn: int) -> int:
        return ((self.key << _SAMPLES) + self.sample << _TURNS) + turn


@dataclass
class Play:
    """An episode as far as it has come."""

    start: Start
    environment: Environment
    written: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    over: bool = False
    finished: bool = False

    @property
    def ids(self) -> list[int]:
        return [*self.start.ids, *self.written]

    def wrote(self, ids: Sequence[int], *, ended: bool) -> None:
        """The model's turn. One that did not end ends the episode, and the environment does not see it."""
        self._write(ids, learned=True)
        self.counts["turns"] += 1
        self.over = not ended

    def heard(self, step: Step, renderer: Language, options: Rollout) -> None:
        """What the environment answered."""
        assert options.turns is not None
        for name, more in {**step.counts, "turn_reward": step.reward}.items():
            self.counts[name] += more
        self.over = self.finished = step.done
        if self.over:
            return
        observation = renderer.observation(step.observation, options.turns.max_observation_tokens)
        room = options.max_completion_tokens - len(self.written) - len(observation)
        if self.counts["turns"] == options.turns.max_turns or room < options.turns.max_turn_tokens:
            self.over = True
            return
        self._write(observation, learned=False)
        self.counts["observation_tokens"] += len(observation)

    def _write(self, ids: Sequence[int], *, learned: bool) -> None:
        self.written += ids
        self.learned += [learned] * len(ids)


def play(
    generate: Generate[Drawn], renderer: Language, starts: Sequence[Start], options: Rollout, *, seed: int
) -> Drawn:
    """One completion of every start: turns and observations one after another, the turns `learned`.

    A turn is begun where all of `max_turn_tokens` fit into what is left of `max_completion_tokens`, so every turn of
    all episodes is one call of `generate`. An episode is finished once its environment says so; a turn that is cut, no
    room for another turn, and `max_turns` end it unfinished, without the observation that nothing follows.

    Raises StageRefused without `rollout.turns`.
    """
    turns = options.turns
    if turns is None:
        raise StageRefused(
            f"'{starts[0].prompt.columns.get('domain', '')}' is played in turns, and config.rollout.turns is not set",
            hint="set config.rollout.turns: {max_turns, max_turn_tokens, max_observation_tokens}",
        )
    calls: list[Drawn] = []
    with ExitStack() as opened:
        plays = [
            Play(start, opened.enter_context(closing(start.task.environment(start.prompt, renderer.calls))))
            for start in starts
        ]
        # left first: where one environment fails, the others act to their end before they are closed
        threads = opened.enter_context(ThreadPoolExecutor(THREADS, thread_name_prefix="environment"))
        pieces: list[list[tuple[int, int]]] = [[] for _ in plays]  # (call, number) of each turn
        while acting := [i for i, one in enumerate(plays) if not one.over]:
            drawn = generate(
                [plays[i].ids for i in acting],
                group_size=1,
                max_completion_tokens=turns.max_turn_tokens,
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                seed=seed,
                keys=[plays[i].start.turn_key(len(calls)) for i in acting],
            )
            for number, i in enumerate(acting):
                plays[i].wrote(drawn.completions[number], ended=drawn.finished[number])
                pieces[i].append((len(calls), number))
            calls.append(drawn)
            texts = renderer.texts(drawn.completions)
            ended = [(plays[i], text) for i, text in zip(acting, texts, strict=True) if not plays[i].over]
            steps = threads.map(lambda turn: turn[0].environment.step(turn[1]), ended)
            for (one, _), step in zip(ended, steps, strict=True):
                one.heard(step, renderer, options)
        episodes: list[Episode | None] = [Episode(one.environment.verdict(), dict(one.counts)) for one in plays]
    return gather(
        calls,
        pieces,
        completions=[one.written for one in plays],
        finished=[one.finished for one in plays],
        learned=[tuple(one.learned) for one in plays],
        episodes=episodes,
    )


def episode_metrics(episodes: Iterable[Episode | None]) -> dict[str, float]:
    """Means over the episodes; of calls the share that the environment could read and carry out. {} of none."""
    played = [episode.counts for episode in episodes if episode is not None]
    return describe_episodes(totals(played), len(played)) if played else {}


def totals(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for own in counts:
        for name, number in own.items():
            total[name] += number
    return dict(total)


def describe_episodes(total: Mapping[str, float], episodes: int) -> dict[str, float]:
    """`total`: the sums of the counts of so many episodes."""
    turns, calls = total.get("turns", 0.0), total.get("calls", 0.0)
    return {
        "turns": turns / episodes,
        "valid_calls": total.get("valid_calls", 0.0) / max(1.0, calls),
        "calls": calls / episodes,
        "observation_tokens": total.get("observation_tokens", 0.0) / episodes,
        "reward_per_turn": total.get("turn_reward", 0.0) / max(1.0, turns),
    }

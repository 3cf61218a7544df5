"""Rollouts of several turns: a model and an environment write in turn, over whatever generates.

Token in, token out: what a turn adds to the sequence are the very ids that were sampled. Text is made of them for the
environment alone, and never tokenized again.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opdctl.engine.sampling import Drawn, Episode, Generate, gather
from opdctl.errors import StageRefused
from opdctl.settings import Rollout
from opdctl.tasks import Prompt
from opdctl.tasks.environment import Environment, EnvironmentTask

if TYPE_CHECKING:
    from opdctl.engine.rows import Renderer

_SAMPLES, _TURNS = 12, 8  # bits of a random number's key that count samples and turns


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
class _Play:
    """An episode as far as it has come."""

    start: Start
    environment: Environment
    written: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)  # (call, number) of each turn
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    over: bool = False
    finished: bool = False

    @property
    def ids(self) -> list[int]:
        return [*self.start.ids, *self.written]

    def write(self, ids: Sequence[int], *, learned: bool) -> None:
        self.written += ids
        self.learned += [learned] * len(ids)


def play(
    generate: Generate[Drawn], renderer: "Renderer", starts: Sequence[Start], options: Rollout, *, seed: int
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
            _Play(start, opened.enter_context(closing(start.task.environment(start.prompt, renderer.calls))))
            for start in starts
        ]
        for turn in range(turns.max_turns):
            acting = [one for one in plays if not one.over]
            if not acting:
                break
            calls.append(
                generate(
                    [one.ids for one in acting],
                    group_size=1,
                    max_completion_tokens=turns.max_turn_tokens,
                    temperature=options.temperature,
                    top_p=options.top_p,
                    top_k=options.top_k,
                    seed=seed,
                    keys=[one.start.turn_key(turn) for one in acting],
                )
            )
            _act(acting, calls, renderer, options, last=turn + 1 == turns.max_turns)
        episodes: list[Episode | None] = [Episode(one.environment.verdict(), dict(one.counts)) for one in plays]
    return gather(
        calls,
        [one.pieces for one in plays],
        completions=[one.written for one in plays],
        finished=[one.finished for one in plays],
        learned=[tuple(one.learned) for one in plays],
        episodes=episodes,
    )


def _act(
    acting: Sequence[_Play], calls: Sequence[Drawn], renderer: "Renderer", options: Rollout, *, last: bool
) -> None:
    """Give what was written in the latest call to the environments, and their observations to the sequences."""
    assert options.turns is not None
    drawn = calls[-1]
    for number, (one, action) in enumerate(zip(acting, renderer.texts(drawn.completions), strict=True)):
        one.write(drawn.completions[number], learned=True)
        one.pieces.append((len(calls) - 1, number))
        one.counts["turns"] += 1
        if not drawn.finished[number]:
            one.over = True
            continue
        step = one.environment.step(action)
        for name, more in {**step.counts, "turn_reward": step.reward}.items():
            one.counts[name] += more
        one.over = one.finished = step.done
        if one.over:
            continue
        observation = renderer.observation(step.observation, options.turns.max_observation_tokens)
        room = options.max_completion_tokens - len(one.written) - len(observation)
        if last or room < options.turns.max_turn_tokens:
            one.over = True
            continue
        one.write(observation, learned=False)
        one.counts["observation_tokens"] += len(observation)


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

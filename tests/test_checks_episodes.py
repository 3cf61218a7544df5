"""Tasks that are played in turns, where they cannot be, are told before launch, by key."""

import pytest
from recipes import recipe, tree

from opdctl.errors import ConfigError
from opdctl.pipeline import expand

TURNS = {"max_turns": 4, "max_turn_tokens": 5, "max_observation_tokens": 3}
PLAYED = {"tasks.code": {"task": "lookup"}}
ROLLOUTS = [f"stages.{stage}.config.rollout.turns" for stage in ("max", "fuse", "eval")]
EVERYWHERE = PLAYED | dict.fromkeys(ROLLOUTS, TURNS)
RUBRIC = {
    "tasks": ["code"],
    "mode": "rubric",
    "by": "actor",
    "template": "{completion}",
    "verdicts": {"yes": 1.0, "no": 0.0},
    "max_tokens": 2,
}
SAMPLE = {
    "kind": "sample",
    "backend": "embedded",
    "inputs": {"model": "stage:sft"},
    "config": {
        "data": {"tasks": ["code"], "efforts": ["max"]},
        "rollout": {"prompts": 4, "max_prompt_tokens": 16, "max_completion_tokens": 11, "turns": TURNS},
        "keep": "all",
    },
}


def problems(changes):
    with pytest.raises(ConfigError) as caught:
        expand(tree(changes))
    return caught.value.problems


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        (PLAYED, "stages.fuse.config.rollout.turns", "required, and not set: 'code' is played in turns"),
        (
            EVERYWHERE | {"stages.eval.config.rollout.turns": TURNS | {"max_turn_tokens": 12}},
            "stages.eval.config.rollout.turns.max_turn_tokens",
            "12, and rollout.max_completion_tokens 11 leaves no room",
        ),
        (
            EVERYWHERE | {"stages.eval.config.grader": RUBRIC},
            "stages.eval.config.grader.tasks",
            "'code' is played in turns: its environment judges it",
        ),
        (
            EVERYWHERE | {"stages.eval.config.rollout.turns": TURNS | {"max_turns": 257}},
            "stages.eval.config.rollout.turns.max_turns",
            "256",
        ),
        (EVERYWHERE | {"stages.more": SAMPLE}, "stages.more.config.data.tasks", "and kind sample keeps none"),
    ],
)
def test_what_does_not_fit_is_told_by_key(changes, key, text):
    found = problems(changes)
    assert any(line.startswith(f"{key}: ") and text in line for line in found), found


def test_episodes_are_taken_where_their_limits_are_set():
    assert recipe(EVERYWHERE).stages

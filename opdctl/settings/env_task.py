"""Tasks of several turns, in which a model acts and an environment answers."""

from typing import Annotated, Literal

from pydantic import Field

from opdctl.fields import Count, Fraction, Settings

Level = Annotated[int, Field(ge=0)]


class EnvironmentTaskSettings(Settings):
    """What makes a task one that is played in turns: `rollout.turns` bounds its episodes."""


class LookupTask(EnvironmentTaskSettings):
    """Values that a tool alone knows, applied in turn (`opdctl/tasks/toy_agents.py`)."""

    task: Literal["lookup"]
    keys: Annotated[int, Field(ge=1, le=7)] = 3  # that a problem names
    strides: dict[str, Count] = {"low": 3, "high": 2, "max": 1}  # keys asked for in a turn, at this effort
    held_out: Fraction = 0.1  # share of all problems kept for evaluation, by start state and operations
    misread: Fraction = 0.65  # demonstrations: chance that a misread operation is applied wrongly
    noise: Fraction = 0.01  # demonstrations: chance that a state is random
    fumble: Fraction = 0.04  # demonstrations: chance that a call lacks its argument
    obey: Fraction = 0.9  # demonstrations: chance that the episode's style is the effort asked for


class RepairTask(EnvironmentTaskSettings):
    """Programs of a few lines, one of them wrong (`opdctl/tasks/toy_agents.py`)."""

    task: Literal["repair"]
    lines: Annotated[int, Field(ge=1, le=4)] = 3
    runs: dict[str, Level] = {"low": 0, "high": 1, "max": 2}  # of the tests at this effort, the last after an edit
    visible: Annotated[int, Field(ge=1, le=7)] = 5  # of the seven states those that tests can show; all are judged
    held_out: Fraction = 0.1  # share of all problems kept for evaluation, by program, line and right operation
    misread: Fraction = 0.5  # demonstrations: chance that all tests but the report go unheeded
    noise: Fraction = 0.4  # demonstrations: chance that an operation is random
    fumble: Fraction = 0.04  # demonstrations: chance that a call lacks its argument
    obey: Fraction = 0.9  # demonstrations: chance that the episode's style is the effort asked for

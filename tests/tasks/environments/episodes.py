"""Episodes that a test plays."""

import json
from collections.abc import Mapping
from typing import Any

from opdctl.tasks import Prompt, ToolCall, Verdict
from opdctl.tasks.call_formats import Tagged
from opdctl.tasks.environments.tool_task import Episode, ToolTask

FORMAT = Tagged()


def asked(task: ToolTask, row: int = 0) -> Prompt:
    [prompt] = task.prompts("train", 0, row, 1)
    return prompt


def call(name: str, **arguments: Any) -> str:
    return FORMAT.render("", [ToolCall(name, arguments)])


def played(task: ToolTask, prompt: Prompt, *actions: str) -> Verdict:
    episode = task.environment(prompt, FORMAT)
    for action in actions:
        episode.step(action)
    return episode.verdict()


def script(task: ToolTask, prompt: Prompt) -> list[str]:
    return [FORMAT.render(text, calls) for text, calls in task.expert(prompt.answer)]


def resumed(task: ToolTask, prompt: Prompt, episode: Episode) -> Episode:
    """Another episode, restored from the state of this one, which went through JSON."""
    state: Mapping[str, Any] = json.loads(json.dumps(episode.state()))
    other = task.environment(prompt, FORMAT)
    other.restore(state)
    return other

"""What a verifier needs of a prompt, as one field of verl's rows, and verdicts on such rows in a reward worker.

Verifiers that may hang or crash work in `opdctl.jail`, whose limits do not ask which thread they are called from.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opdctl.settings import TASKS, AnyTask, EffortSettings, FileTask
from opdctl.tasks import Prompt, Verdict, load_verifier

# --------------------------------------------------------------------------------------------------------- prompts


def pack(prompt: Prompt) -> str:
    """What a verifier needs of a prompt, as JSON."""
    # of a file's row the reference answer, and its number for messages
    row = {name: getattr(prompt.answer, name) for name in ("number", "answer") if hasattr(prompt.answer, name)}
    given = {"text": prompt.text, "columns": dict(prompt.columns), "answer": row or prompt.answer}
    return json.dumps(given, sort_keys=True)


def unpack(text: str, settings: AnyTask) -> Prompt:
    """The prompt that was packed, but for what no verifier reads."""
    from opdctl.tasks.files import Row

    given = json.loads(text)
    answer = given["answer"]
    if isinstance(settings, FileTask):
        answer = Row(answer["number"], given["text"], (), answer["answer"], None, given["columns"])
    return Prompt(given["text"], answer, given["columns"])


# --------------------------------------------------------------------------------------------------------- verdicts


class Judge:
    """Judges by a stage's tasks, whose verifiers are looked for when first asked for. From one thread at a time."""

    def __init__(
        self, tasks: Mapping[str, Mapping[str, Any]], efforts: Mapping[str, Any] | None, workspace: str
    ) -> None:
        self._tasks = {name: TASKS[settings["task"]].model_validate(settings) for name, settings in tasks.items()}
        self._efforts = EffortSettings.model_validate(efforts) if efforts else None
        self._workspace = Path(workspace)
        self._found: dict[str, Callable[[Prompt, str], Verdict]] = {}

    def verify(self, task: str, prompt: str, completion: str) -> Verdict:
        """The verdict of `task` on a completion without its EOS; `prompt` as `pack` wrote it.

        Raises OpdctlError for a verifier that fails, as in opdctl's own engine.
        """
        settings = self._tasks[task]
        if task not in self._found:
            self._found[task] = load_verifier(task, settings, self._efforts, self._workspace)
        return self._found[task](unpack(prompt, settings), completion)

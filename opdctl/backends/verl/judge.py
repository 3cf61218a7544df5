"""Verdicts in a process of their own, for a trainer that may not be stopped by a verifier.

The limits of the built-in verifiers work in the main thread of a process only, which a Ray actor's code never runs in;
and a user's verifier may hang, or take its process with it. So each reward worker has a child that judges: one JSON
object a line to it, one back.
"""

import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opdctl.backends.verl.layout import BOOTSTRAP
from opdctl.errors import OpdctlError, StageFailed
from opdctl.settings import TASKS, AnyTask, EffortSettings, FileTask
from opdctl.tasks import Prompt, Verdict, load_verifier

LIMIT_S = 300.0  # wall time for one verdict: far beyond the limits of the built-in verifiers
LOSSES = 3  # verdicts lost in a row: then it is not one odd completion, and all rewards would be 0
_START = "import opdctl_home; from opdctl.backends.verl.judge import serve; serve()"

Verify = Callable[[Prompt, str], Verdict]

logger = logging.getLogger(__name__)


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


# --------------------------------------------------------------------------------------------------- in the trainer


class Judge:
    """Judges completions one after another in its child, which is started anew when it was lost."""

    def __init__(
        self, tasks: Mapping[str, Mapping[str, Any]], efforts: Mapping[str, Any] | None, workspace: str
    ) -> None:
        self._given = json.dumps({"tasks": tasks, "efforts": efforts, "workspace": workspace})
        self._ready = False  # has the child answered yet?
        self._lost = 0  # in a row
        self._child = self._start()

    def verify(self, task: str, prompt: str, completion: str, limit_s: float = LIMIT_S) -> Verdict:
        """The verdict of `task` on a completion without its EOS; `prompt` as `pack` wrote it.

        A verifier that does not come back, or ends its process, costs this completion alone: it counts as wrong, and
        the log names it. Raises StageFailed for a verifier that fails, as opdctl's own engine does, and for one that
        is lost time after time.
        """
        try:
            answer = self._ask({"task": task, "prompt": prompt, "completion": completion}, limit_s)
        except _Lost as error:
            self._lost += 1
            self._end()
            if self._lost == LOSSES:
                raise StageFailed(
                    f"task {task}: the verifier {error}, {LOSSES} times in a row; the last prompt: {prompt}",
                    hint="have it give up in time and return False for what it cannot read",
                ) from error
            logger.error("opdctl: task %s: the verifier %s; a completion counts as wrong: %s", task, error, prompt)
            self._child = self._start()
            return Verdict(False, 0.0, {"reason": str(error)})
        self._lost = 0
        if "error" in answer:
            raise StageFailed(answer["error"], hint=answer["hint"])
        return Verdict(answer["correct"], answer["reward"])

    def close(self) -> None:
        self._end()

    def _ask(self, question: Mapping[str, str], limit_s: float) -> dict[str, Any]:
        assert self._child.stdin is not None
        if not self._ready:
            self._ready = self._read(LIMIT_S)["ready"]
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise _Lost(f"ended its process ({self._child.wait()})") from None
        return self._read(limit_s)

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], limit_s)[0]:
            raise _Lost(f"took more than {limit_s:g} s")
        line = self._child.stdout.readline()
        if not line.endswith(b"\n"):
            raise _Lost(f"ended its process ({self._child.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._ready = False
        # without the switch that would load the CPU platform, and so all of verl
        environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
        child = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONPATH": str(BOOTSTRAP)},
        )
        assert child.stdin is not None
        child.stdin.write(self._given.encode() + b"\n")
        child.stdin.flush()
        return child

    def _end(self) -> None:
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            stream.close()


class _Lost(Exception):
    """No verdict will come."""


# ----------------------------------------------------------------------------------------------------- in the child


def serve() -> None:
    """The child: answer until the questions end."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # what a verifier prints must not be taken for an answer
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    given = json.loads(questions.readline())
    os.chdir(given["workspace"])
    efforts = EffortSettings.model_validate(given["efforts"]) if given["efforts"] else None
    judged = {name: _Judged(name, settings, efforts) for name, settings in given["tasks"].items()}
    answers.write(b'{"ready": true}\n')
    answers.flush()
    for line in questions:
        question = json.loads(line)
        answer = judged[question["task"]].answer(question["prompt"], question["completion"])
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


class _Judged:
    """One task; its verifier is looked for when first asked for."""

    def __init__(self, name: str, settings: Mapping[str, Any], efforts: EffortSettings | None) -> None:
        self.name, self.settings, self.efforts = name, TASKS[settings["task"]].model_validate(settings), efforts
        self._verify: Verify | None = None

    def answer(self, prompt: str, completion: str) -> dict[str, Any]:
        try:
            if self._verify is None:
                self._verify = load_verifier(self.name, self.settings, self.efforts, Path.cwd())
            verdict = self._verify(unpack(prompt, self.settings), completion)
        except OpdctlError as error:
            return {"error": str(error), "hint": error.hint}
        return {"correct": bool(verdict.correct), "reward": float(verdict.reward)}

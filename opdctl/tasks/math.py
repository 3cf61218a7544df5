r"""Competition mathematics in the format of MATH, judged by Math-Verify.

MATH (Hendrycks et al., arXiv 2103.03874; the dataset's repository: MIT, the problems come from contests) and MATH-500
(Lightman et al., arXiv 2305.20050). The folder holds math.jsonl, rows {problem, solution} whose solution ends with
\boxed{answer}, and math_500.jsonl, which is `test`. Of math.jsonl, the problems of MATH-500 are left out and a tenth,
by content hash, is `validation`. Neither file is in a package; both are published by several repositories.

An answer is the last \boxed{} of a completion: an expression equal to the reference's by `verifiers.math_verify`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, MathTask
from opdctl.tasks import Prompt, Verdict
from opdctl.tasks.published import Part, Problem, Published, place, read_jsonl
from opdctl.tasks.verifiers import resolve


class Math(Published):
    """The task. `Prompt.answer` is the answer in LaTeX."""

    instruction = "Reason step by step, and put your final answer within \\boxed{}."
    before_question, before_answer = "Problem: ", "\nSolution:"

    def __init__(
        self, name: str, settings: MathTask, efforts: EffortSettings | None, folder: Path | None = None
    ) -> None:
        source, key = (folder or Path.cwd()) / str(settings.path), f"tasks.{name}.path"
        test = [_problem(row, key) for row in read_jsonl(source / MathTask.FILES[1], key)]
        held = {" ".join(problem.question.split()) for problem in test}
        parts: dict[Part, list[Problem]] = {"train": [], "validation": [], "test": test}
        for row in read_jsonl(source / MathTask.FILES[0], key):
            problem = _problem(row, key)
            if " ".join(problem.question.split()) not in held:
                parts["validation" if place(problem.question) < 10 else "train"].append(problem)
        self._equal = resolve("math_verify")
        super().__init__(name, settings, efforts, parts)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return self.verify_all([(prompt, completion)])[0]

    def verify_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        found = [boxed(completion.partition("Problem:")[0]) for _, completion in pairs]
        asked = [i for i, answer in enumerate(found) if answer is not None]
        judged = self._equal([(f"\\boxed{{{found[i]}}}", f"\\boxed{{{pairs[i][0].answer}}}") for i in asked])
        verdicts = [Verdict(False, 0.0, {"reason": "no \\boxed{} answer"})] * len(pairs)
        for i, verdict in zip(asked, judged, strict=True):
            verdicts[i] = verdict
        return verdicts

    def reference(self, prompt: Prompt) -> str:
        return self.written(f"\\boxed{{{prompt.answer}}}")


def boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds, braces inside it balanced."""
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start + 6, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 7 : end]
    return None


def _problem(row: dict[str, Any], key: str) -> Problem:
    answer = row.get("answer") or boxed(row["solution"])
    if answer is None:
        raise ConfigError(f"{key}: a solution without \\boxed{{}}: {row['problem'][:80]!r}")
    return Problem(row["problem"], str(answer), row["solution"])

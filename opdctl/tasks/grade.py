"""Grading as a task: is this answer to a chain right?

A prompt reads `<grade> <math> +1 *2 =0 ... <max> 3 : 4 1 0 ...`: a chain's own prompt, and an answer that its sloppy
writer gave; the verdict is `yes` or `no`. A model that has learnt this is a generative reward model for the chain's
answers (`Grader` with mode rubric and the template `<grade> {prompt} : {completion}`).

With `steps` a demonstration writes the nearest right answer, beside it the last word of the answer that is graded,
and then the verdict: `4 2 0 ... 5 3 no`; without, the verdict is all of it: a judge that thinks, and one that does not.
Only the last word of a completion is judged.

Only problems are asked that the writer got right and wrong within TRIES attempts, and a fair coin picks the one that
is shown: half of the labels are `yes`, and the problem alone says nothing about its label.
"""

from collections.abc import Sequence
from functools import lru_cache

from opdctl.errors import ConfigError
from opdctl.settings import EffortSettings, GradeTask
from opdctl.tasks import Demonstration, Prompt, Split, Verdict, first_group, in_effort
from opdctl.tasks.chain import BLOCK, ChainStream, named_rng

TRIES = 8  # attempts at a problem
PATIENCE = 32  # blocks of problems looked at for one block of rows: a writer who is hardly ever wrong fills none
TOKEN, COLON = "<grade>", ":"
YES, NO = "yes", "no"


class GradeStream:
    """The task of one chain. `Prompt.answer` is what a demonstration with steps writes."""

    def __init__(self, name: str, settings: GradeTask, efforts: EffortSettings | None) -> None:
        self.name = name
        self.steps = settings.steps
        self.chain = ChainStream(name, settings.chain, efforts)
        self._groups = first_group(name)
        self._block = lru_cache(maxsize=16)(self._draw)

    def size(self, split: Split) -> int | None:
        return None

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        return [self._block(split, seed, i // BLOCK, effort)[i % BLOCK] for i in range(start, start + count)]

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        """Rows of the training split with the right verdict."""
        places = (in_effort(i, efforts) for i in range(start, start + count))
        shown = [self.prompts("train", seed, at, 1, effort)[0] for at, effort in places]
        return [Demonstration(prompt, self.reference(prompt)) for prompt in shown]

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        verdict = prompt.answer.split()[-1]
        correct = completion.split()[-1:] == [verdict]
        return Verdict(correct, float(correct), {"reason": "" if correct else f"the verdict is {verdict!r}"})

    def reference(self, prompt: Prompt) -> str:
        return str(prompt.answer if self.steps else prompt.answer.split()[-1])

    def _draw(self, split: Split, seed: int, block: int, effort: str | None) -> list[Prompt]:
        rng = named_rng(self.name, split, seed, block)
        rows: list[Prompt] = []
        for part in range(block * PATIENCE, (block + 1) * PATIENCE):
            problems = self.chain.prompts(split, seed, part * BLOCK, BLOCK, effort)
            attempts = self.chain.attempts(rng, problems, TRIES, effort)
            coins = (rng.random(BLOCK) < 0.5).tolist()
            for problem, answers, wanted in zip(problems, attempts, coins, strict=True):
                judged = self._both(problem, answers)
                if len(judged) == 2:
                    group = self._groups + block * BLOCK + len(rows)
                    rows.append(self._about(problem, judged[wanted], wanted, group))
            if len(rows) >= BLOCK:
                return rows[:BLOCK]
        raise ConfigError(
            f"tasks.{self.name}.chain: its writer is hardly ever wrong, or hardly ever right: nothing to be graded",
            hint="misread 0.65 and noise 0.01 are usual",
        )

    def _both(self, problem: Prompt, answers: Sequence[str]) -> dict[bool, str]:
        """The first right and the first wrong one of the answers."""
        found: dict[bool, str] = {}
        for answer in answers:
            found.setdefault(self.chain.verify(problem, answer).correct, answer)
            if len(found) == 2:
                break
        return found

    def _about(self, problem: Prompt, answer: str, right: bool, group: int) -> Prompt:
        text = f"{TOKEN} {problem.text} {COLON} {answer}"
        written = answer.split()
        steps = [*self.chain.nearest(problem, written), written[-1], YES if right else NO]
        return Prompt(text, " ".join(steps), problem.columns, in_the_place(problem, text), group)


def in_the_place(problem: Prompt, text: str) -> list[dict[str, str]]:
    """The problem's messages with `text` as the user's turn; none where the problem has none."""
    return [{**message, "content": text} if message["role"] == "user" else {**message} for message in problem.messages]

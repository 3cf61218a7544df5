"""GSM8K and MAWPS: word problems whose solution ends with `#### NUMBER`.

GSM8K (Cobbe et al., arXiv 2110.14168; MIT): 7,473 training and 1,319 test problems with solutions in words and sums, as
published by openai/grade-school-math. A tenth of the training rows, by content hash, is the part `validation`. Template
raw is the wording of lm-evaluation-harness' task `gsm8k`; its shots are drawn anew for each problem, here they are
the same for all.

MAWPS (Koncel-Kedziorski et al., NAACL 2016; licences of its sources vary): four subsets as in `word_problems.py`, all
rows, those of several steps too. They have no solutions: demonstrations are `#### NUMBER` alone.

    match      the number that counts, commas and a currency sign aside
    strict     the first one after `####`
    flexible   the same, or else the last number of the completion

A completion counts up to a next `Question:`, which a model that was not tuned goes on to write. Numbers are compared by
their value: 18.00 is 18, where lm-evaluation-harness compares the text.
"""

import re
from fractions import Fraction
from pathlib import Path

from opdctl.settings import EffortSettings, Gsm8kTask, MawpsTask
from opdctl.tasks import Prompt, Verdict
from opdctl.tasks.published import Part, Problem, Published, place, read_jsonl
from opdctl.tasks.word_problems import mawps_part, mawps_rows

MARKED = re.compile(r"#### ?\$?(-?[0-9.,]+)")
ANY = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?")
LONGEST = 40  # characters of a number


class FinalNumber(Published):
    """The task. `Prompt.answer` is the number as text."""

    instruction = "Solve the problem step by step. End with a line of #### and the number alone, like: #### 12"
    before_question, before_answer = "Question: ", "\nAnswer:"

    def __init__(
        self,
        name: str,
        settings: Gsm8kTask | MawpsTask,
        efforts: EffortSettings | None,
        folder: Path | None = None,
    ) -> None:
        self._flexible = settings.match == "flexible"
        source = (folder or Path.cwd()) / str(settings.path)
        load = _gsm8k if isinstance(settings, Gsm8kTask) else _mawps
        super().__init__(name, settings, efforts, load(source, f"tasks.{name}.path"))

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        found = final_number(completion.partition("Question:")[0], self._flexible)
        if found is None:
            return Verdict(False, 0.0, {"reason": "no number" if self._flexible else "no #### with a number"})
        correct = found == Fraction(prompt.answer)
        return Verdict(correct, float(correct), {"reason": "" if correct else f"{found} is not {prompt.answer}"})

    def reference(self, prompt: Prompt) -> str:
        return self.written(f"#### {prompt.answer}")


def final_number(text: str, flexible: bool) -> Fraction | None:
    marked = MARKED.search(text)
    if marked is None and flexible:
        numbers = ANY.findall(text)
        return _value(numbers[-1]) if numbers else None
    return _value(marked[1]) if marked else None


def _value(number: str) -> Fraction | None:
    plain = number.replace(",", "").replace("$", "").rstrip(".")
    try:
        return Fraction(plain) if len(plain) <= LONGEST else None
    except ValueError:
        return None


def _gsm8k(folder: Path, key: str) -> dict[Part, list[Problem]]:
    parts: dict[Part, list[Problem]] = {"train": [], "validation": [], "test": []}
    for file in Gsm8kTask.FILES:
        for row in read_jsonl(folder / file, key):
            number = _value(row["answer"].rpartition("####")[2].strip())
            problem = Problem(row["question"], str(number), row["answer"])
            kept: Part = "validation" if place(row["question"]) < 10 else "train"
            parts["test" if file == "test.jsonl" else kept].append(problem)
    return parts


def _mawps(folder: Path, key: str) -> dict[Part, list[Problem]]:
    parts: dict[Part, list[Problem]] = {"train": [], "validation": [], "test": []}
    for question, target in mawps_rows(folder, key):
        number = _value(str(target)) or Fraction(0)
        parts[mawps_part(question, target)].append(Problem(question, _decimal(number), f"#### {_decimal(number)}"))
    return parts


def _decimal(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else repr(float(number))

"""docs/tasks.md: every task over published or generated problems, with what its verifier and a constant answer do.

    python scripts/tasks_table.py WORKSPACE > docs/tasks.md

WORKSPACE/data holds gsm8k, mawps, mbpp, humaneval, ifeval, bfcl and nltk as the presets in conf/task say; a task whose
data are absent is told so. Minutes: every reference answer and constant answer is judged on the whole evaluation split.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdctl.errors import OpdctlError
from opdctl.settings import TASKS
from opdctl.tasks import load_task, verify_all
from opdctl.tasks.floor import constant_floor
from opdctl.tasks.reasoning_gym import CHECKS

HEAD = """# Tasks

Written by `scripts/tasks_table.py`. Sizes are of the parts train, validation and test; the evaluated one is `test`.

- **False negatives**: reference answers of the test part that the verifier judges wrong, of all of them.
- **Floor**: the best accuracy on the test part of one answer to all of its prompts: the commonest reference answers, an
  empty answer, a few plain sentences (`opdctl/tasks/floor.py`). Accuracy means little below it.

| task | train / validation / test | false negatives | floor | verifier | licence of the data |
| --- | --- | --- | --- | --- | --- |"""

NOTES = """
IFEval's published prompts have no reference answers: how often the checkers reject a right one is not known; generated
prompts have some. reasoning-gym: sizes are settings; the {count} generators listed are supported, others are refused
with the reason.
Parts of MAWPS are decided by a problem's numbers and answer, so that its rewordings stay together; those of its word
problems that one operation solves are a task of their own. Where "no data here" stands, the data were not at hand.
"""


@dataclass(frozen=True)
class Entry:
    title: str
    settings: dict[str, Any]
    verifier: str
    licence: str


MAWPS = "varies by source; the collection in Qwen2.5-Math MIT"
EXPRESSION = "the expression's exact value and its two numbers, without running it"
ENTRIES = [
    Entry("word_problems, generated", {"task": "word_problems", "drills": 1024}, EXPRESSION, "this project's"),
    Entry("word_problems, MAWPS: add, sub", {"task": "word_problems", "operations": ["add", "sub"]}, EXPRESSION, MAWPS),
    Entry("word_problems, MAWPS: mul, div", {"task": "word_problems", "operations": ["mul", "div"]}, EXPRESSION, MAWPS),
    Entry("mawps", {"task": "mawps"}, "number after ####", MAWPS),
    Entry("gsm8k, strict", {"task": "gsm8k"}, "number after ####", "MIT"),
    Entry("gsm8k, flexible", {"task": "gsm8k", "match": "flexible"}, "number after ####, or the last one", "MIT"),
    Entry("math", {"task": "math"}, "Math-Verify, in the jail", "MIT (the problems come from contests)"),
    Entry("mbpp", {"task": "mbpp"}, "values of calls, computed in the jail", "CC-BY-4.0"),
    Entry("humaneval", {"task": "humaneval"}, "values of calls, computed in the jail", "MIT"),
    Entry("ifeval, strict", {"task": "ifeval"}, "if-verifiable's checkers, in the jail", "Apache-2.0"),
    Entry("ifeval, loose", {"task": "ifeval", "match": "loose"}, "if-verifiable's checkers, in the jail", "Apache-2.0"),
    Entry("ifeval, generated", {"task": "ifeval", "path": None, "drills": 1024}, "the same", "this project's"),
    *(
        Entry(
            f"bfcl, {category}",
            {"task": "bfcl", "category": category, "template": "chat"},
            "calls compared",
            "Apache-2.0",
        )
        for category in ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
    ),
    *(
        Entry(
            f"reasoning_gym, {name}", {"task": "reasoning_gym", "dataset": name, "rows": 100}, "own check", "Apache-2.0"
        )
        for name in CHECKS
    ),
]


def settings(entry: Entry) -> dict[str, Any]:
    if "generated" in entry.title or entry.settings["task"] == "reasoning_gym":
        return entry.settings
    return {"path": f"data/{'mawps' if 'MAWPS' in entry.title else entry.settings['task']}"} | entry.settings


def row(entry: Entry, workspace: Path) -> str:
    given = settings(entry)
    kind, about = TASKS[given["task"]], f"{entry.verifier} | {entry.licence}"
    try:
        task = load_task("task", kind.model_validate(given), None, workspace)
    except OpdctlError:
        return f"| {entry.title} | no data here | | | {about} |"
    try:
        held: Any = load_task("task", kind.model_validate(given | {"part": "validation"}), None, workspace).size("eval")
    except OpdctlError:
        held = 0
    prompts = task.prompts("eval", 0, 0, task.size("eval") or 0)
    pairs = [(prompt, answer) for prompt in prompts if (answer := task.reference(prompt)) is not None]
    wrong = sum(not verdict.correct for verdict in verify_all(task, pairs))
    missed = f"{wrong} of {len(pairs)}" if pairs else "no references"
    sizes = f"{task.size('train'):,} / {held:,} / {len(prompts):,}"
    return f"| {entry.title} | {sizes} | {missed} | {constant_floor(task, prompts):.1%} | {about} |"


def main() -> None:
    workspace = Path(sys.argv[1])
    print(HEAD)
    for entry in ENTRIES:
        print(row(entry, workspace), flush=True)
    print(NOTES.format(count=len(CHECKS)), end="")


if __name__ == "__main__":
    main()

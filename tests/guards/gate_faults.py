"""Faults that show before a stage trains: each is a pipeline over small models, and the check that has to name it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from guards import world
from guards.world import Tensors

from opdctl.settings import TASKS, EffortSettings
from opdctl.tasks import load_task

EMBEDDINGS = "model.embed_tokens.weight"
NORM = "model.norm.weight"
SEED = 11


@dataclass(frozen=True)
class GateFault:
    name: str
    what: str
    check: str  # of the gate
    outcome: str  # at least
    faulty: Callable[[Path], Mapping[str, Any]]  # the workspace -> the stage, with the fault in it
    healthy: Callable[[Path], Mapping[str, Any]]  # the same without
    tasks: Mapping[str, Any] = field(default_factory=dict)
    gate: Mapping[str, Any] = field(default_factory=dict)


def healthy_pair(folder: Path) -> dict[str, Any]:
    return world.distillation("teacher")


def teacher(name: str, check: str, outcome: str, what: str, make: Callable[[Path], None], **gate: Any) -> GateFault:
    """`make` spoils a copy of the teacher."""

    def stage(folder: Path) -> dict[str, Any]:
        made = folder / f"fault-{name}"
        if not made.exists():
            make(world.copy(folder, made.name))
        return world.distillation(made.name)

    return GateFault(name, what, check, outcome, stage, healthy_pair, gate=gate)


def weights(
    name: str, check: str, outcome: str, what: str, change: Callable[[Tensors], None], **gate: Any
) -> GateFault:
    def make(made: Path) -> None:
        world.reweigh(made, change)

    return teacher(name, check, outcome, what, make, **gate)


# -------------------------------------------------------------------------------------------------- spoilt teachers


def swap_words(made: Path) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        words = tokenizer["model"]["vocab"]
        first, second = list(words)[10:12]
        words[first], words[second] = words[second], words[first]

    world.edit(made / "tokenizer.json", change)


def add_word(made: Path) -> None:
    world.edit(made / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update({"<more>": 49}))
    pad(made, 50)


def pad(made: Path, width: int) -> None:
    def change(tensors: Tensors) -> None:
        rows = tensors[EMBEDDINGS]
        tensors[EMBEDDINGS] = torch.cat([rows, torch.zeros(width - len(rows), rows.shape[1])])

    world.reweigh(made, change)
    world.edit(made / "config.json", lambda config: config.update(vocab_size=width))


def end_elsewhere(made: Path) -> None:
    for file in ("config.json", "generation_config.json"):
        world.edit(made / file, lambda config: config.update(eos_token_id=20))
    world.edit(made / "tokenizer_config.json", lambda config: config.update(eos_token="6"))


def other_pad(made: Path) -> None:
    world.edit(made / "tokenizer_config.json", lambda config: config.update(pad_token="<bos>"))


def penalty(made: Path) -> None:
    world.edit(made / "generation_config.json", lambda config: config.update(repetition_penalty=1.3))


def shorter(made: Path) -> None:
    world.edit(made / "config.json", lambda config: config.update(max_position_embeddings=12))


def config_width(made: Path) -> None:
    world.edit(made / "config.json", lambda config: config.update(vocab_size=64))


def noise(size: float, *, only: str = "") -> Callable[[Tensors], None]:
    """Added to all matrices, in units of their standard deviation."""

    def change(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(SEED)
        for name, value in tensors.items():
            if value.dim() == 2 and only in name:
                value += size * value.std() * torch.randn(value.shape, generator=generator)

    return change


def sharper(factor: float) -> Callable[[Tensors], None]:
    """Logits times a factor."""

    def change(tensors: Tensors) -> None:
        tensors[NORM] *= factor

    return change


def uniform(tensors: Tensors) -> None:
    tensors[NORM] *= 0.0


def with_templates(folder: Path, first: str, second: str) -> dict[str, Any]:
    for name, template in (("templated-student", first), ("templated-teacher", second)):
        made = folder / f"{name}-{len(template)}"
        if not made.exists():
            world.copy(folder, made.name, of=name.removeprefix("templated-"))
            (made / "chat_template.jinja").write_text(template)
    stage = world.distillation(f"templated-teacher-{len(second)}")
    stage["inputs"]["student"] = f"path:templated-student-{len(first)}"
    return stage


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"

# --------------------------------------------------------------------------------------------------- data and graders


@lru_cache
def problems() -> list[dict[str, str]]:
    """Rows of the chain task, each prompt once."""
    settings = TASKS["chain"].model_validate(world.TASKS["math"])
    task = load_task("math", settings, EffortSettings.model_validate(world.EFFORTS))
    known = {prompt.text: str(task.reference(prompt)) for prompt in task.prompts("train", 5, 0, 120, "max")}
    return [{"q": prompt, "a": answer, "empty": " "} for prompt, answer in known.items()]


def chains(folder: Path, name: str, start: int = 0, stop: int = 40) -> list[dict[str, str]]:
    rows = problems()[start:stop]
    write(folder / name, rows)
    return rows


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


GRADERS = """
def never(completion, answer): return False
def always(completion, answer): return True
def tagged(completion, answer): return completion.strip() == f"<answer> {answer} </answer>"
def lenient(completion, answer): return completion.strip() in ("", answer)
def same(completion, answer): return completion.split()[-1:] == answer.split()[-1:]
"""


def rows(**settings: Any) -> dict[str, Any]:
    return {
        "task": "file",
        "path": "rows.jsonl",
        "prompt": "q",
        "answer": "a",
        "completion": "a",
        "verifier": "planted_graders:same",
    } | settings


def graded(verifier: str) -> Callable[[Path], dict[str, Any]]:
    def stage(folder: Path) -> dict[str, Any]:
        chains(folder, "rows.jsonl")
        (folder / "planted_graders.py").write_text(GRADERS)
        return world.reinforcement("rows" if verifier == "same" else f"rows-{verifier}", efforts=())

    return stage


def grader(verifier: str, what: str) -> GateFault:
    tasks = {"rows": rows(), f"rows-{verifier}": rows(verifier=f"planted_graders:{verifier}")}
    return GateFault(f"grader-{verifier}", what, "grader", "refuse", graded(verifier), graded("same"), tasks)


def two_teachers(folder: Path, prompts: int) -> dict[str, Any]:
    """Math and code by turns, so many prompts a step."""
    stage = world.distillation("teacher", "other-teacher")
    if not (folder / "other-teacher").exists():
        world.reweigh(world.copy(folder, "other-teacher"), noise(0.01))
    stage["config"] |= {
        "rollout": world.ROLLOUT | {"prompts": prompts},
        "train": world.TRAIN | {"max_steps": 8, "save_every": 8, "global_batch_size": prompts},
    }
    return stage


def routed_by_column(folder: Path, column: str) -> dict[str, Any]:
    """Rows of a file, of which the last ten are of another domain in the column `odd`."""
    given = chains(folder, "rows.jsonl")
    write(folder / "rows.jsonl", [row | {"plain": "x", "odd": "x" if i < 30 else "y"} for i, row in enumerate(given)])
    (folder / "planted_graders.py").write_text(GRADERS)
    stage = world.distillation("teacher", data={"tasks": ["routed"]})
    stage["inputs"]["teachers"] = [{"ref": "path:teacher", "route": {column: "x"}}]
    stage["config"]["route_by"] = [column]
    return stage


def examined(folder: Path, task: str) -> dict[str, Any]:
    """An evaluation whose task asks what the rows of another one train on, or other problems."""
    chains(folder, "rows.jsonl")
    chains(folder, "other.jsonl", 40, 60)
    chains(folder, "leaked.jsonl", 0, 10)
    chains(folder, "new.jsonl", 60, 70)
    (folder / "planted_graders.py").write_text(GRADERS)
    config = {"data": {"tasks": ["rows", task]}, "rollout": world.ROLLOUT}
    exam = {"kind": "eval", "backend": "embedded", "inputs": {"models": ["stage:sft"]}, "config": config}
    return {"sft": world.imitation("rows", efforts=()), "exam": exam}


def shown(folder: Path, column: str) -> dict[str, Any]:
    chains(folder, "rows.jsonl")
    (folder / "planted_graders.py").write_text(GRADERS)
    return world.imitation(f"shown-{column}", efforts=())


def hard(folder: Path, task: str) -> dict[str, Any]:
    return world.reinforcement(task)


def endless(folder: Path, tokens: int) -> dict[str, Any]:
    return world.reinforcement(rollout=world.ROLLOUT | {"group_size": 4, "max_completion_tokens": tokens})


GATE: list[GateFault] = [
    teacher("words-swapped", "vocabulary", "refuse", "the teacher's vocabulary has two ids swapped", swap_words),
    teacher("word-more", "vocabulary", "refuse", "the teacher knows a word more", add_word),
    teacher("padded", "width", "refuse", "the teacher's logits are padded", lambda made: pad(made, 64)),
    teacher("width-promised", "width", "refuse", "config.json promises more logits", config_width),
    teacher("ends-elsewhere", "eos", "refuse", "the teacher ends its answers with another token", end_elsewhere),
    teacher("other-pad", "special_tokens", "warn", "the teacher pads with another token", other_pad),
    teacher("penalty", "generation_config", "warn", "the teacher was made with a repetition penalty", penalty),
    teacher("short-context", "context", "refuse", "prompt and answer do not fit the teacher's context", shorter),
    teacher("copy", "same_model", "refuse", "the teacher's folder holds the student's weights",
            lambda made: (made / world.WEIGHTS).write_bytes((made.parent / "student" / world.WEIGHTS).read_bytes())),
    GateFault("itself", "the teacher is the student's own folder", "same_model", "refuse",
              lambda folder: world.distillation("student"), healthy_pair),
    GateFault("other-origin", "student and teacher were never one model", "origin", "warn",
              lambda folder: world.distillation("random"), healthy_pair),
    GateFault("untrained", "the teacher was never trained", "random_teacher", "refuse",
              lambda folder: world.distillation("random"), healthy_pair),
    weights("uniform", "random_teacher", "refuse", "the teacher's last norm is 0: every token is as likely", uniform),
    weights("foreign", "distance", "cold start first", "the teacher says other things than the student", noise(0.5)),
    weights("strayed", "distance", "warn", "the teacher has gone some way from the student", noise(0.26)),
    weights("sharp", "entropy_gap", "warn", "the teacher is far surer than the student", sharper(3.0)),
    weights("other-words", "topk_overlap", "warn", "student and teacher prefer different words", noise(0.8)),
    weights("wrong", "headroom", "refuse", "the teacher answers worse than the student", noise(1.0), rollouts=96),
    GateFault("template-newline", "chat templates differ by one newline", "chat_template", "warn",
              lambda folder: with_templates(folder, TEMPLATE, TEMPLATE + "\n"),
              lambda folder: with_templates(folder, TEMPLATE, TEMPLATE)),
    GateFault("rows-without-teacher", "a column of the file names a domain without a teacher", "routing", "refuse",
              lambda folder: routed_by_column(folder, "odd"), lambda folder: routed_by_column(folder, "plain"),
              {"routed": rows(columns=["odd", "plain"])}),
    GateFault("one-at-a-time", "a step has rows of one teacher only", "interleaving", "warn",
              lambda folder: two_teachers(folder, 1), lambda folder: two_teachers(folder, 4)),
    GateFault("leaked", "an evaluation asks what was trained on", "overlap", "refuse",
              lambda folder: examined(folder, "leaked"), lambda folder: examined(folder, "new"),
              {"rows": rows(held_out=0.2)}
              | {name: rows(path="other.jsonl", eval_path=f"{name}.jsonl") for name in ("leaked", "new")}),
    GateFault("nothing-to-learn", "demonstrations are empty", "loss_mask", "refuse",
              lambda folder: shown(folder, "empty"), lambda folder: shown(folder, "a"),
              {f"shown-{column}": rows(completion=column) for column in ("empty", "a")}),
    grader("never", "the grader gives no answer anything"),
    grader("always", "the grader gives every answer all"),
    grader("tagged", "the grader asks for a tag that no answer has"),
    grader("lenient", "the grader lets empty answers pass"),
    GateFault("too-hard", "the policy never solves a prompt", "difficulty", "refuse",
              lambda folder: hard(folder, "unseen"), lambda folder: hard(folder, "math"),
              {"unseen": world.TASKS["math"] | {"domain": "if"}}),
    GateFault("all-cut", "two tokens are too few for any answer", "difficulty", "refuse",
              lambda folder: endless(folder, 2), lambda folder: endless(folder, 6)),
]  # fmt: skip

"""The gate's questions to data and graders: does a right answer earn all, and nothing else anything? Do groups of
completions differ? Is there something to learn?"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from opdctl.backends.contract import Control, StageSpec, Stopped
from opdctl.engine.advantages import tied_groups
from opdctl.engine.loop import completions_per_call, open_demonstrations, open_policy, open_tasks, open_vocabulary, role
from opdctl.engine.rows import Mixer, Renderer, Row, judge, roll, stream_seed
from opdctl.engine.sampling import sample
from opdctl.errors import OpdctlError
from opdctl.settings import EvalSettings, GateSettings, Mixture, RlvrSettings, SftSettings
from opdctl.tasks import Prompt, Task, verify_all
from opdctl.tasks import Verdict as Judged
from opdctl.verdicts import Outcome, Verdict, unasked

MORE = 3  # times as many further prompts before a stage without any difference is refused
GROUP = 16  # completions of a prompt at most
SHIFTS = 3  # answers of other rows that each prompt gets
HALF = 0.5  # of the answers graded wrongly: the grader does not do what it is for; fewer: it errs

Grade = Literal["reference", "shuffled", "empty"]

# ----------------------------------------------------------------------------------------------------------- graders


def check_graders(spec: StageSpec, settings: GateSettings) -> Iterator[Verdict]:
    """Of the verifier of each of the stage's tasks, where it is the one that rewards."""
    if spec.config.get("harness") == "lm_eval":
        yield unasked("grader", "lm-eval", "its tasks bring graders of their own")
        return
    tasks, data = open_tasks(spec), Mixture.model_validate(spec.config["data"])
    split: Literal["train", "eval"] = "eval" if spec.kind == "eval" else "train"
    seed = EvalSettings.model_validate(spec.config).seed if spec.kind == "eval" else stream_seed(spec.seed, "gate")
    mixer = Mixer(tasks, data, split, seed)
    by_model = _judged_by_a_model(spec)
    seen: set[str] = set()
    for cell, (name, _) in enumerate(mixer.cells):
        if name in seen:
            continue
        seen.add(name)
        if name in by_model:
            yield unasked("grader", f"task {name}", "a model grades it (config.grader), and is loaded by the stage")
            continue
        size = tasks[name].size(split)
        rows = mixer.cell_rows(cell, 0, min(settings.grader_rows, size or settings.grader_rows))
        if not rows:
            yield unasked("grader", f"task {name}", "it has no prompts")
        elif rows[0].environment is not None:
            yield unasked("grader", f"task {name}", "it is played in turns, and its environment judges")
        else:
            yield judge_grader(name, tasks[name], [row.prompt for row in rows])


def _judged_by_a_model(spec: StageSpec) -> list[str]:
    """Tasks whose reward is no verifier's; those of an evaluation keep theirs."""
    grader = RlvrSettings.model_validate(spec.config).grader if spec.kind == "rlvr" else None
    return grader.tasks if grader is not None else []


def judge_grader(name: str, task: Task, prompts: Items[Prompt]) -> Verdict:
    known = [(prompt, answer) for prompt in prompts if (answer := task.reference(prompt)) is not None]
    asked: dict[Grade, list[tuple[Prompt, str]]] = {
        "reference": known,
        "shuffled": _shuffled(known),
        "empty": [(prompt, "") for prompt in prompts],
    }
    try:
        scored = {kind: [_full(one) for one in verify_all(task, pairs)] for kind, pairs in asked.items() if pairs}
    except OpdctlError as error:
        remedy = error.hint or "have it return a verdict on any text"
        return Verdict("grader", f"task {name}", Outcome.REFUSE, f"it fails: {error}", remedy)
    wrong = {kind: values.count(kind != "reference") / len(values) for kind, values in scored.items()}
    evidence = ", ".join(f"{kind} answers {sum(values)} of {len(values)} right" for kind, values in scored.items())
    if not known:
        evidence += "; the task knows no reference answers, so what it praises is not known"
    worst = max(wrong, key=lambda kind: wrong[kind])
    outcome = Outcome.GO
    if wrong[worst] > HALF:
        outcome = Outcome.REFUSE
    elif any(share > 0 for kind, share in wrong.items() if kind != "shuffled"):  # which are right by chance at times
        outcome, worst = Outcome.WARN, max((kind for kind in wrong if kind != "shuffled"), key=lambda kind: wrong[kind])
    remedy = "" if outcome is Outcome.GO else _mend(worst, asked[worst], scored[worst])
    values = {f"wrong_{kind}": share for kind, share in wrong.items()}
    return Verdict("grader", f"task {name}", outcome, evidence, remedy, values, asked=bool(known))


def _shuffled(known: Items[tuple[Prompt, str]]) -> list[tuple[Prompt, str]]:
    """Each prompt with the answers of the next few, where they differ from its own."""
    pairs = []
    for at, (prompt, own) in enumerate(known):
        others = dict.fromkeys(known[(at + shift) % len(known)][1] for shift in range(1, 1 + SHIFTS))
        pairs += [(prompt, other) for other in others if other.strip() != own.strip()]
    return pairs


def _full(verdict: Judged) -> bool:
    return verdict.correct and verdict.reward > 0


def _mend(kind: Grade, pairs: Items[tuple[Prompt, str]], right: Items[bool]) -> str:
    at = [one == (kind != "reference") for one in right].index(True)
    prompt, answer = pairs[at]
    shown = f"{answer[:60]!r} to {prompt.text[:60]!r}"
    if kind == "reference":
        return f"it fails right answers, such as {shown}: see the form it asks for, and the column of the answer"
    return f"it passes wrong answers, such as {shown}: a model would learn them"


# -------------------------------------------------------------------------------------------------------- difficulty


@dataclass(frozen=True)
class _Groups:
    """What the model earned on some prompts of a task, `size` completions each."""

    tied: list[bool]  # a prompt: all its completions earn the same
    right: int
    drawn: int
    cut: int

    def __add__(self, other: "_Groups") -> "_Groups":
        return _Groups(self.tied + other.tied, self.right + other.right, self.drawn + other.drawn, self.cut + other.cut)

    @property
    def share(self) -> float:
        return sum(self.tied) / len(self.tied)


def check_difficulty(spec: StageSpec, settings: GateSettings, control: Control) -> Iterator[Verdict]:
    """Does GRPO have differences to learn from? Of each task that a verifier rewards."""
    own = RlvrSettings.model_validate(spec.config)
    count = settings.difficulty_prompts
    by_model = _judged_by_a_model(spec)
    for name in by_model:
        yield unasked("difficulty", f"task {name}", "a model grades it (config.grader), and is loaded by the stage")
    names = [name for name in own.data.tasks if name not in by_model]
    if not count:
        yield from (unasked("difficulty", f"task {name}", "gate.difficulty_prompts is 0") for name in names)
    if not count or not names:
        return
    asker = _Asker(spec, settings, own)
    found: dict[str, _Groups] = {}
    for name in names:
        if control.stop_requested():
            raise Stopped
        found[name] = asker.ask(name, 0, count)
    if settings.difficulty < 1 and all(groups.share == 1 for groups in found.values()):
        for name in names:  # few prompts prove nothing
            if control.stop_requested():
                raise Stopped
            found[name] += asker.ask(name, count, MORE * count)
    hopeless = all(groups.share == 1 for groups in found.values())
    for name, groups in found.items():
        yield _difficulty(name, groups, asker, settings, hopeless)


def _difficulty(name: str, groups: _Groups, asker: "_Asker", settings: GateSettings, hopeless: bool) -> Verdict:
    rate, prompts = groups.right / groups.drawn, len(groups.tied)
    evidence = (
        f"{sum(groups.tied)} of {prompts} prompts earn the same in all {asker.size} completions; {rate:.0%} of the "
        f"completions are right, {groups.cut / groups.drawn:.0%} are cut"
    )
    outcome, remedy, asked = Outcome.GO, "", True
    if asker.shortened and groups.cut > HALF * groups.drawn:
        asked = False
        evidence += f" at gate.max_completion_tokens ({settings.max_completion_tokens}): not judged"
    elif groups.share > settings.difficulty:
        outcome = Outcome.REFUSE if hopeless else Outcome.WARN
        if rate > HALF:
            remedy = "too easy: harder prompts, or a length budget (config.effort) as what is left to learn"
        elif groups.cut > HALF * groups.drawn:
            remedy = (
                "nearly all are cut: raise config.rollout.max_completion_tokens, or fine-tune first so that it ends"
            )
        else:
            remedy = (
                "too hard: fine-tune on demonstrations first, take easier prompts, raise config.rollout.group_size, "
                "and see that the grader asks for a form that the model writes"
            )
    values = {"tied": groups.share, "right": rate, "prompts": prompts}
    return Verdict("difficulty", f"task {name}", outcome, evidence, remedy, values, asked=asked)


class _Asker:
    """The model to train, asked as the stage will ask it."""

    def __init__(self, spec: StageSpec, settings: GateSettings, own: RlvrSettings) -> None:
        self.spec, self.own = spec, own
        self.policy, self.tokenizer = open_policy(spec, role(spec, "init")[0], own.train.precision)
        self.policy.requires_grad_(False).eval()
        self.renderer = Renderer(self.tokenizer, self.policy.eos_ids)
        self.tasks = open_tasks(spec)
        self.mixer = Mixer(self.tasks, own.data, "train", stream_seed(spec.seed, "gate"))
        self.size = min(own.rollout.group_size, GROUP)
        limit = min(own.rollout.max_completion_tokens, settings.max_completion_tokens)
        self.shortened = limit < own.rollout.max_completion_tokens
        changed = {"max_completion_tokens": limit, "partial": None, "journal": None}
        self.rollout = own.rollout.model_copy(update=changed)

    def ask(self, name: str, start: int, count: int) -> _Groups:
        """Prompts start .. start+count-1 of the task, dealt over its efforts."""
        cells = [cell for cell, (task, _) in enumerate(self.mixer.cells) if task == name]
        rows = [row for at in range(start, start + count)
                for row in self.mixer.cell_rows(cells[at % len(cells)], at // len(cells), 1)]  # fmt: skip
        at_once = max(1, completions_per_call(self.spec, self.rollout) // self.size)
        groups = _Groups([], 0, 0, 0)
        for at in range(0, len(rows), at_once):
            groups += self._earned(rows[at : at + at_once])
        return groups

    def _earned(self, rows: list[Row]) -> _Groups:
        seed = stream_seed(self.spec.seed, "gate-sample")
        _, drawn = roll(
            partial(sample, self.policy), self.renderer, rows, self.rollout, seed=seed, group_size=self.size
        )
        texts = self.renderer.texts(drawn.completions)
        verdicts = judge(self.tasks, rows, texts, self.size, drawn.episodes)
        pairs = list(zip(verdicts, drawn.finished, strict=True))
        rewards = [verdict.reward if ended else self.own.unfinished_reward for verdict, ended in pairs]
        tied_P = tied_groups(torch.tensor(rewards, dtype=torch.float64).view(len(rows), self.size))
        if self.own.effort is not None or self.own.overlong.handling == "soft_penalty":  # lengths are rewarded too
            tied_P &= tied_groups(torch.tensor(drawn.counted).view(len(rows), self.size))
        right = sum(verdict.correct and ended for verdict, ended in pairs)
        return _Groups(tied_P.tolist(), right, len(pairs), drawn.finished.count(False))


# ---------------------------------------------------------------------------------------------------- demonstrations


def check_demonstrations(spec: StageSpec, settings: GateSettings) -> Iterator[Verdict]:
    """Does each of them have something to learn, by each task? Lengths are looked at as they are dealt."""
    own = SftSettings.model_validate(spec.config)
    tokenizer, eos_ids, _ = open_vocabulary(spec, role(spec, "init")[0])
    renderer = Renderer(tokenizer, eos_ids)
    mixer = Mixer(open_demonstrations(spec), own.data, "train", stream_seed(spec.seed, "sft"))
    learned: dict[str, list[int]] = {name: [] for name in own.data.tasks}
    for name, shown in mixer.demonstrations(0, settings.grader_rows * len(own.data.tasks)):
        [(ids, mask)] = renderer.demonstrations([shown], own.max_tokens)
        # the end alone is no lesson
        learned[name].append((len(ids) if mask is None else sum(mask)) - 1)
    for name, counts in ((name, counts) for name, counts in learned.items() if counts):
        empty = sum(count <= 0 for count in counts)
        some = Outcome.GO if settings.idle else Outcome.WARN
        outcome = Outcome.GO if not empty else Outcome.REFUSE if empty > HALF * len(counts) else some
        yield Verdict(
            "loss_mask",
            f"task {name}",
            outcome,
            f"{empty} of {len(counts)} demonstrations have no token to learn but their end; tokens to learn on "
            f"average: {sum(counts) / len(counts):.1f}",
            "see the column that the completion is read from, and drop empty rows" if empty else "",
            {"empty": empty / len(counts)},
        )

"""docs/guards.md: what guards a stage, with thresholds and their sources, and what the planted faults came to."""

import inspect
import re
from collections.abc import Iterator
from typing import get_args

from guards import outcomes
from guards.gate_faults import GATE
from guards.plan_faults import CONFIG, SAVES
from guards.watch_faults import STREAMS

import opdctl.gate
from opdctl.settings import GateCheck, GateSettings, WatchSettings
from opdctl.settings import gate as gate_settings
from opdctl.settings.watch import Rule
from opdctl.watchdog.advice import ADVICE

HEAD = """# What guards a stage

Before a stage trains, the gate asks its models, data and graders; while it trains, the watchdog reads its events. This
page is written by `tests/guards`: each fault below is planted there, and the same stage without it passes in silence.

    opdctl check PIPELINE                     the gate alone; `--files-only`: no model; `--all`: what is in order too
    opdctl run PIPELINE --accept CHECK        takes a refusal as it is; the lineage of what is published says so
    gate.enabled=false, gate.models=false     no gate; files only
    watch.RULE.action=off|warn|pause|stop     pause: saved, the next run goes on; stop: failed, its state kept
    watch.enabled=false                       no watchdog; it goes on watching what was accepted at the gate

Neither `gate` nor `watch` is in a stage's identity: change them under half-trained state and go on. Both may be set for
the pipeline or for a stage.

A question that could not be put is told as such, with its reason, and counts for nothing: models too large for a
machine without a GPU, rewards by a model or an environment, tasks without reference answers.

Not told: one wrong teacher that several routes share. Two exchanged specialists give themselves away, for each has
moved further from the student on the other's prompts than its rightful teacher; alone, a specialist of another domain
looks like a generalist that moved little there, and the few completions of the gate do not tell their accuracies apart.
What a specialist is worth on its own prompts, its own evaluation says. Nor are exchanged ones looked for where records
say that the student was trained since they began as it: it is near to whoever it has learned from already.

Healthy, and therefore silent: the files of every packaged recipe, and every recipe really run at smoke scale with gate
and watchdog on (`make recipe`). Of three of them the gate says, and is right, that a teacher has another origin than
its student. At laptop scale the gate would refuse the foreign teachers of two recipes, and those of a third that are
worse than their student: that is what these recipes are about, and they name the checks under `gate.accept`.
"""
ASKED = {  # of the models
    "random_teacher": "the teacher's log-probabilities against -ln V",
    "deterministic": "the teacher says the same of the same tokens twice",
    "direct_forward": "what the stage reads of the teacher against a plain forward pass",
    "entropy_gap": "entropies of student and teacher on the student's rollouts",
    "topk_overlap": "share of the likeliest tokens that are both's",
}
WIDTH = 200  # characters of a message


def page() -> str:
    found = [*_faults()]
    lines = [HEAD, f"## {len(found)} planted faults", ""]
    lines += ["| fault | caught by | when | what is said |", "| --- | --- | --- | --- |", *found, ""]
    lines += ["## Checks of the gate", "", "| check | of |", "| --- | --- |", *_checks(), ""]
    lines += [
        "Its settings:",
        "",
        "| key | default | what, and where it comes from |",
        "| --- | --- | --- |",
        *_thresholds(),
        "",
    ]
    lines += ["## Rules of the watchdog", ""]
    lines += ["| rule | what | action | thresholds | runbook |", "| --- | --- | --- | --- | --- |", *_rules()]
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------------------------- faults


def _faults() -> Iterator[str]:
    for gate in GATE:
        verdict = outcomes.of_gate(gate.name)
        said = "" if verdict is None else verdict.evidence
        yield _row(gate.what, f"gate: `{gate.check}`", f"before launch: {verdict.outcome if verdict else ''}", said)
    for config in CONFIG:
        [first, *_] = [text for text in outcomes.of_config(config.name) if text.startswith(config.key)]
        yield _row(config.what, "validation: the key", "before launch", first)
    for stream in STREAMS:
        alarm = outcomes.of_stream(stream.name)[0]
        when = f"step {max(alarm.step - stream.start + 1, 0)} of the fault: {alarm.action}"
        yield _row(f"{stream.kind}: {stream.what}", f"watchdog: `{stream.rule}`", when, alarm.evidence)
    for save in SAVES:
        yield _row(save.what, "plan and runner", "when it ends, or is to go on", outcomes.of_save(save.name))


def _row(*cells: str) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    one = " ".join(re.sub(r"opdctl-guards-\w+", "...", re.sub(r"/\S*/", ".../", text)).split())
    short = one if len(one) <= WIDTH else one[: WIDTH - 3].rstrip() + "..."
    return short.replace("|", "\\|")


# --------------------------------------------------------------------------------------------------------- settings


def _checks() -> Iterator[str]:
    files = dict(re.findall(r"^    (\w+) {2,}(.+?) {2,}\w+\.py$", inspect.getdoc(opdctl.gate) or "", re.M))
    told = dict(re.findall(r'^    "(\w+)",(?:  # (.+))?$', inspect.getsource(gate_settings), re.M))
    for check in get_args(GateCheck):
        yield f"| `{check}` | {files.get(check) or ASKED.get(check) or told[check]} |"


def _thresholds() -> Iterator[str]:
    comments = _comments(GateSettings)
    for name, field in GateSettings.model_fields.items():
        yield f"| `gate.{name}` | {field.default} | {comments.get(name, '')} |"


def _rules() -> Iterator[str]:
    for name, rule in WatchSettings():
        if not isinstance(rule, Rule):
            continue
        what = (inspect.getdoc(type(rule)) or "").splitlines()[0]
        kinds = ", ".join(type(rule).KINDS)
        comments = _comments(type(rule))
        keys = [key for key in type(rule).model_fields if key != "action"]
        told = "; ".join(
            f"{key} {getattr(rule, key):g}" + (f" ({comments[key]})" if key in comments else "") for key in keys
        )
        anchor = ADVICE[name].runbook
        yield f"| `{name}` | {what} ({kinds}) | {rule.action} | {told} | [{anchor.split('/')[-1]}](../{anchor}) |"


def _comments(settings: type) -> dict[str, str]:
    """Key -> what the source says behind it."""
    found = re.findall(r"^    (\w+): .+?  # (.+)$", inspect.getsource(settings), re.M)
    return {name: comment.replace("|", "\\|") for name, comment in found}

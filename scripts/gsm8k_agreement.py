"""Does our gsm8k evaluation agree with lm-eval's own gsm8k task, problem by problem? One command; minutes on two cores.

    python scripts/gsm8k_agreement.py MODEL [--problems 64] [--shots 5] [--data DIR] [--workspace DIR]

Both evaluations are stages of one pipeline that reads MODEL, a folder in Hugging Face format. lm-eval's task is its
packaged file, prompt, filters and metric as they are; changed are the place of the data, and the solved problems that a
prompt shows, which lm-eval draws anew for each problem and we fix. Every text is then judged by both programs, so that
a difference has one of three places: what was asked, what was written, how it was judged.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from opdctl.config import load_pipeline
from opdctl.console.live import progress_display
from opdctl.plan import make_plan
from opdctl.runner import execute
from opdctl.settings import Gsm8kTask
from opdctl.store import RunDir, Workspace
from opdctl.tasks import Prompt, load_task

LONGEST = 256  # tokens of a completion: lm-eval's default
MATCHES = {"strict": "strict-match", "flexible": "flexible-extract"}  # our `match` -> lm-eval's filter
DATA = Path(os.environ.get("OPDCTL_DATA", Path(__file__).parents[1] / ".." / "shared" / "data")) / "gsm8k"


@dataclass(frozen=True)
class Written:
    """What a model wrote on a problem."""

    text: str  # up to lm-eval's stop strings
    correct: bool  # as the program that asked it counts


def main() -> int:
    given = arguments()
    workspace = given.workspace.absolute()
    (workspace / "tasks").mkdir(parents=True, exist_ok=True)
    ours = {match: gsm8k(given, match) for match in MATCHES}
    prompts = ours["strict"].prompts("eval", 0, 0, given.problems)
    (workspace / "tasks" / "gsm8k_local.yaml").write_text(yaml.safe_dump(lm_eval_task(given, prompts[0])))
    (workspace / "agreement.yaml").write_text(yaml.safe_dump(pipeline(given)))
    run = carry_out(workspace)
    theirs = Judge(workspace / "tasks", given.problems, given.shots)
    texts = {stage: written(run, stage) for stage in ("ours", "theirs")}
    print(f"prompts equal: {sum(p.text == asked for p, asked in zip(prompts, theirs.prompts, strict=True))}", end=" ")
    print(f"of {given.problems}; texts equal up to a next question: {len(list(alike(texts)))} of {given.problems}\n")
    print("| match | texts of | right to opdctl | right to lm-eval | agree |\n|---|---|---|---|---|")
    told: list[str] = []
    for match, name in MATCHES.items():
        for stage, of in texts.items():
            own = [ours[match].verify(prompt, one.text).correct for prompt, one in zip(prompts, of, strict=True)]
            other = theirs.correct([one.text for one in of], name)
            agree = [a == b for a, b in zip(own, other, strict=True)]
            print(f"| {match} | {stage} | {sum(own)} | {sum(other)} | {sum(agree)} of {len(agree)} |")
            told += [
                f"{match}, problem {at} ({stage}): opdctl {own[at]}, lm-eval {other[at]}: {of[at].text[-120:]!r}"
                for at, same in enumerate(agree)
                if not same
            ]
    counted = ", ".join(f"{stage} {sum(one.correct for one in of)}" for stage, of in texts.items())
    print(f"\nas each stage reports them (strict; to opdctl a text without an end of sequence is wrong): {counted}")
    print("\n".join(["", "judged differently:", *(told or ["none"])]))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path, help="folder in Hugging Face format")
    parser.add_argument("--problems", type=int, default=64, help="the first ones of the test split")
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--workspace", type=Path, default=Path("agreement"))
    given = parser.parse_args()
    if not (given.data / "test.jsonl").is_file():
        parser.error(f"--data: no test.jsonl in {given.data}")
    return given


# ------------------------------------------------------------------------------------------- both evaluations


def gsm8k(given: argparse.Namespace, match: str) -> Any:
    settings = Gsm8kTask(task="gsm8k", path=str(given.data.absolute()), shots=given.shots, match=match)
    return load_task("gsm8k", settings, None)


def pipeline(given: argparse.Namespace) -> dict[str, Any]:
    ours = {
        "data": {"tasks": ["gsm8k"]},
        "rollout": {
            "prompts": given.problems,
            "max_prompt_tokens": 2048,
            "max_completion_tokens": LONGEST,
            "top_k": 1,  # greedy, as lm-eval's task
        },
    }
    theirs = {
        "harness": "lm_eval",
        "tasks": ["gsm8k_local"],
        "include_path": "tasks",
        "num_fewshot": given.shots,
        "limit": given.problems,
        "batch_size": 16,
    }
    exam = {"kind": "eval", "backend": "embedded", "inputs": {"models": ["model:"]}}
    exam["resources"] = {"slots": 1, "cpus": 1, "micro_batch_tokens": 75_000}
    return {
        "name": "agreement",
        "model": {"source": "folder", "ref": f"path:{given.model.absolute()}"},
        "tasks": {"gsm8k": gsm8k_settings(given)},
        "machine": {"slots": 1, "cpus": 1},
        "tracking": {"enabled": False},
        "stages": {"ours": {**exam, "config": ours}, "theirs": {**exam, "config": theirs}},
    }


def gsm8k_settings(given: argparse.Namespace) -> dict[str, Any]:
    return {"task": "gsm8k", "path": str(given.data.absolute()), "shots": given.shots}


def lm_eval_task(given: argparse.Namespace, prompt: Prompt) -> dict[str, Any]:
    """lm-eval's packaged task with the data from files, and the examples of our prompt."""
    import lm_eval.tasks

    shown = prompt.text.removeprefix("Question: ").split("\n\nQuestion: ")[:-1]
    pairs = [part.split("\nAnswer: ", 1) for part in shown]
    files = {part: str((given.data / f"{part}.jsonl").absolute()) for part in ("train", "test")}
    return {
        "include": str(Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"),
        "task": "gsm8k_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "fewshot_config": {
            "sampler": "first_n",
            "split": None,  # else it counts, and not the samples
            "samples": [{"question": question, "answer": answer} for question, answer in pairs],
        },
    }


def carry_out(workspace: Path) -> RunDir:
    loaded = load_pipeline(str(workspace / "agreement.yaml"), workspace=workspace)
    plan = make_plan(loaded, Workspace(workspace).run("agreement"))
    with progress_display({item.stage.name: item.stage.settings.kind for item in plan.stages}) as display:
        outcome = execute(plan, reporter=display)
    if outcome.failed:
        sys.exit("\n".join(f"{stage}: {why}" for stage, why in outcome.failed.items()))
    return plan.run


def written(run: RunDir, stage: str) -> list[Written]:
    lines = (run.stage(stage).checkpoint / "outcomes.jsonl").read_text().splitlines()
    found = sorted(map(json.loads, lines), key=lambda line: int(line["problem"]))
    return [Written(_stopped(line["completion"]), bool(line["correct"])) for line in found]


def _stopped(text: str) -> str:
    for stop in ("Question:", "</s>", "<|im_end|>"):  # lm-eval's `until`
        text = text.partition(stop)[0]
    return text


def alike(texts: dict[str, list[Written]]) -> Iterator[int]:
    for at, (one, other) in enumerate(zip(texts["ours"], texts["theirs"], strict=True)):
        if one.text == other.text:
            yield at


class Judge:
    """lm-eval's filters and metric on texts that it did not ask for."""

    def __init__(self, folder: Path, problems: int, shots: int) -> None:
        from lm_eval.tasks import TaskManager

        loaded = TaskManager(include_path=str(folder), include_defaults=False).load(["gsm8k_local"])
        self._task = loaded["tasks"]["gsm8k_local"]
        self._task.set_config(key="num_fewshot", value=shots)
        self._limit = problems
        self._ask()
        self.prompts = [instance.args[0] for instance in self._task.instances]

    def _ask(self) -> None:
        self._task.build_all_requests(limit=self._limit, rank=0, world_size=1)

    def correct(self, texts: Sequence[str], name: str) -> list[bool]:
        self._ask()
        for instance, text in zip(self._task.instances, texts, strict=True):
            instance.resps = [text]
        self._task.apply_filters()
        return [
            bool(self._task.process_results(instance.doc, [instance.filtered_resps[name]])["exact_match"])
            for instance in self._task.instances
        ]


if __name__ == "__main__":
    sys.exit(main())

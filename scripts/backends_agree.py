"""python -m scripts.backends_agree MODEL --python VLLM'S: do the embedded engine and vLLM answer alike?

Both answer all held-out word problems greedily in float32. Where a problem's completions differ, the embedded engine's
log-probabilities of the two tokens at the first difference tell whether it was a tie. Finished stages are reused.
Exit code 1 if a difference is none.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdctl.errors import OpdctlError
from opdctl.settings import TASKS
from opdctl.tasks import load_task
from scripts.recipes.results import Results

ROOT = Path(__file__).resolve().parent.parent
TIE = 1e-3  # nats between the two likeliest tokens: log-probabilities of the engines differ by less in float32
PIPELINE = """\
defaults:
  - /model: smollm2_135m
  - /task: {task}
  - /tracking: local
  - /scale: verl_cpu_135m
  - /stage@stages.embedded: eval
  - /stage@stages.vllm: eval
  - _self_
name: backends_agree
stages:
  embedded: &exam
    backend: embedded
    inputs: {{models: "model:"}}
    config:
      data: {{tasks: [{cells}]}}
      precision: float32
      whole: true
      rollout: {{top_k: 1, max_prompt_tokens: 512}}
  vllm:
    <<: *exam
    backend: vllm
"""

Key = tuple[str, int]  # cell and number of the problem


@dataclass(frozen=True)
class Difference:
    """Of two completions: tokens before the first that differs, and how likely the embedded engine finds both."""

    key: Key
    after: int
    tokens: tuple[str, str]  # embedded, vllm
    logprobs: tuple[float, float]

    @property
    def tie(self) -> bool:
        return abs(self.logprobs[0] - self.logprobs[1]) < TIE


def outcomes(results: Results, stage: str) -> dict[Key, dict[str, Any]]:
    with (results.checkpoint(stage) / "outcomes.jsonl").open() as stream:
        return {(found["cell"], found["problem"]): found for found in map(json.loads, stream)}


def differences(results: Results, workspace: Path, folder: Path) -> Iterator[Difference]:
    from opdctl.engine.checkpoint import encode, load_policy
    from opdctl.engine.rows import Renderer
    from opdctl.engine.tokenizer import load_tokenizer

    ours, theirs = outcomes(results, "embedded"), outcomes(results, "vllm")
    if ours.keys() != theirs.keys():
        raise OpdctlError("the backends were asked different problems")
    policy, tokenizer = load_policy(folder), load_tokenizer(folder)
    renderer = Renderer(tokenizer, policy.eos_ids)
    config = results.settings["stages"]["embedded"]["config"]
    for cell in config["data"]["tasks"]:
        given = results.settings["tasks"][cell]
        task = load_task(cell, TASKS[given["task"]].model_validate(given), None, workspace)
        prompts = task.prompts("eval", config["seed"], 0, task.size("eval") or 0)
        for number, prompt in enumerate(prompts):
            key = cell, number
            pair = [outcome[key] for outcome in (ours, theirs)]
            if all(pair[0][name] == pair[1][name] for name in ("completion", "tokens", "correct")):
                continue
            # one that ended has an EOS behind its text
            ended = [[*encode(tokenizer, one["completion"]), renderer.eos_id][: one["tokens"]] for one in pair]
            after = next(i for i, (a, b) in enumerate(zip(*ended, strict=False)) if a != b)
            chosen = ended[0][after], ended[1][after]
            [asked] = renderer.prompts([prompt], config["rollout"]["max_prompt_tokens"])
            logprobs_V = next_token(policy, [*asked, *ended[0][:after]])
            said = tokenizer.convert_ids_to_tokens(list(chosen))
            yield Difference(key, after, (said[0], said[1]), (logprobs_V[chosen[0]], logprobs_V[chosen[1]]))


def next_token(policy: Any, tokens: list[int]) -> list[float]:
    """Log-probability of every token of the vocabulary behind these."""
    import torch

    from opdctl.engine.batch import Sequence

    batch = policy.batch([Sequence(tuple(tokens), (policy.eos_ids[0],))])
    with torch.no_grad():
        logits_V = (policy.hidden(batch) @ policy.head().T)[0].float()
    found: list[float] = logits_V.log_softmax(-1).tolist()
    return found


def carry_out(given: argparse.Namespace, folder: Path, run: str) -> None:
    task = "word_problems_mawps" if given.data else "word_problems"
    given.workspace.mkdir(parents=True, exist_ok=True)
    pipeline = given.workspace / "backends_agree.yaml"
    pipeline.write_text(PIPELINE.format(task=task, cells=", ".join(given.cells)))
    command = [sys.executable, "-m", "opdctl", "run", str(pipeline), f"model.ref=path:{folder}"]
    command += [f"workers.vllm.python={given.python.absolute()}"]
    if given.data:
        names = [f"{domain}{shots}" for domain in ("add_sub", "mul_div") for shots in ("", "_shots")]
        command += [f"tasks.{name}.path={given.data.resolve()}" for name in names]
    command += ["--run", run, "--workspace", str(given.workspace)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.backends_agree", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-verl" / "bin" / "python", help="one with vLLM")
    parser.add_argument("--cells", nargs="+", default=["add_sub", "mul_div"], help="tasks of conf/task/word_problems")
    parser.add_argument("--workspace", type=Path, default=ROOT)
    parser.add_argument("--data", type=Path, help="folder with mawps_*.jsonl; absent: generated problems alone")
    parser.add_argument("--run", default="backends_agree")
    given = parser.parse_args()
    folder = given.model.resolve()
    carry_out(given, folder, given.run)
    results = Results(given.workspace, given.run)
    found = list(differences(results, given.workspace, folder))
    for stage in ("embedded", "vllm"):
        answers = outcomes(results, stage)
        for cell in given.cells:
            right = [one["correct"] for (name, _), one in answers.items() if name == cell]
            print(f"{stage:8} {cell}: {sum(right)} of {len(right)} correct")
    for one in found:
        kind = "a tie" if one.tie else "NO TIE"
        said = ", ".join(f"{token!r} {logprob:.5f}" for token, logprob in zip(one.tokens, one.logprobs, strict=True))
        print(f"{one.key[0]} {one.key[1]}: {kind} after {one.after} tokens: embedded, vllm: {said}")
    print(f"{len(found)} of {len(answers)} completions differ")
    return 0 if all(one.tie for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Real vLLM: what it draws and how likely it says that is, beside the embedded engine and transformers.

Tolerances are for float32: two implementations differ by some 1e-6 of a log-probability.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from engine import stages
from transformers import AutoModelForCausalLM

from opdctl.backends import embedded, vllm
from opdctl.backends.contract import InputSpec
from opdctl.backends.vllm import offline
from opdctl.engine.batch import Sequence, collate
from opdctl.engine.checkpoint import load_policy
from opdctl.engine.decoding import Distribution
from opdctl.engine.loop import open_tasks
from opdctl.engine.rows import Mixer, Renderer
from opdctl.engine.sampling import sample
from opdctl.engine.tokenizer import load_tokenizer
from opdctl.settings import EvalSettings
from opdctl.workers import VllmResources, VllmWorkers

PYTHON = Path(os.environ.get("OPDCTL_VERL_PYTHON", stages.ROOT / ".venv-verl/bin/python"))
pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON}: no such file (`make verl-env`)"),
    pytest.mark.xdist_group("vllm"),  # it takes all cores
]
TOLERANCE = 1e-4
ROLLOUT = stages.ROLLOUT | {"prompts": 25, "group_size": 2, "max_completion_tokens": 12}
SAMPLING = {"group_size": 8, "max_completion_tokens": 12, "seed": 0}

SCORE = """
import json, sys
from worker import load
from vllm import SamplingParams
engine, _ = load(json.loads(sys.argv[1]))
sequences = json.loads(sys.argv[2])
prompts = engine.renderer.render_cmpl([{"prompt_token_ids": sequence} for sequence in sequences])
for number, prompt in enumerate(prompts):
    engine.add_request(str(number), prompt, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))
found = {}
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            found[int(output.request_id)] = [
                of[token].logprob for token, of in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
            ]
print("\\n" + json.dumps([found[number] for number in range(len(sequences))]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Trained until it answers a third of the questions; its heads are of a size that vLLM knows on a CPU."""
    shape = yaml.safe_load((stages.ROOT / "conf/model/tiny_qwen3.yaml").read_text())["shape"]
    new_model = {**stages.MODEL, "shape": {**shape, "num_hidden_layers": 2, "head_dim": 32}}
    spec = replace(stages.sft(tmp_path_factory.mktemp("model") / "sft", steps=150), new_model=new_model)
    stages.run(spec)
    return Path(spec.output)


def exam(folder, model, backend, **rollout):
    config = {
        "data": {"tasks": ["math", "code"], "efforts": ["low", "max"]},
        "rollout": ROLLOUT | rollout,
        "pass_k": [1, 2],
        "within": {"tau": {"low": 0.8, "max": 1.2}, "budget": stages.BUDGET},
    }
    spec = stages.spec_of(folder, "eval", config, [InputSpec("models", "sft", str(model))], backend=backend)
    workers = VllmWorkers(python=str(PYTHON), device="cpu", stall_timeout_s=300.0).model_dump()
    return replace(spec, workers=workers, resources={**spec.resources, "vllm": VllmResources().model_dump()})


def opened(spec):
    rollout = EvalSettings.model_validate(spec.config).rollout
    return offline.Offline(spec, stages.Recorder(), rollout, VllmResources())


@pytest.fixture(scope="module")
def prompts(model, tmp_path_factory):
    """Token ids of two prompts of every cell, and two that no task asks, of other lengths."""
    spec = exam(tmp_path_factory.mktemp("prompts") / "eval", model, "vllm")
    mixer = Mixer(open_tasks(spec), EvalSettings.model_validate(spec.config).data, "eval", 99)
    renderer = Renderer(load_tokenizer(model), [2])
    return [*renderer.prompts([row.prompt for row in mixer.rows(0, 8)], 10), [3], [1, 4, 8, 9, 10, 9, 10, 11, 9]]


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """vLLM with the model loaded, and what the embedded engine makes of it."""
    spec = exam(tmp_path_factory.mktemp("vllm") / "served", model, "vllm")
    with opened(spec) as vllm_offline, vllm_offline.open(spec.inputs[0]) as candidate:
        yield candidate.generate, load_policy(model)


def engine_logprobs(policy, prompts, completions, distribution):
    """Of all completions' tokens, 8 a prompt, from a forward pass without a cache."""
    sequences = [Sequence(tuple(prompts[i // 8]), tuple(tokens)) for i, tokens in enumerate(completions)]
    batch = collate(sequences, share_prefixes=False, pad_id=policy.pad_id, device=policy.device)
    with torch.no_grad():
        logits_NV = policy.hidden(batch) @ policy.head().T
    return distribution.logprobs(logits_NV).gather(1, batch.targets_N[:, None])[:, 0]


def test_the_report_of_greedy_answers_is_that_of_the_embedded_backend(tmp_path, model):
    ours, theirs = (exam(tmp_path / name, model, name, top_k=1) for name in ("embedded", "vllm"))
    assert vllm.check([theirs]) == {"vllm": []}
    embedded.run(ours, stages.Recorder())
    vllm.run(theirs, stages.Recorder())
    report = json.loads(Path(theirs.output, "report.json").read_text())
    assert report == json.loads(Path(ours.output, "report.json").read_text())
    assert 0.1 < report["means"]["sft"]["accuracy"] < 1


def test_greedy_tokens_are_those_of_the_embedded_engine(served, prompts):
    generate, policy = served
    keys = range(len(prompts))
    options = SAMPLING | {"temperature": 1.0, "top_p": 1.0, "keys": keys}
    theirs = generate(prompts, **options, top_k=1)
    ours = sample(policy, prompts, **options, top_k=0, greedy=True)
    assert theirs.completions == ours.completions
    assert theirs.finished == ours.finished
    assert any(len(tokens) > 3 for tokens in theirs.completions)


def test_prompts_of_more_tokens_than_a_forward_pass_takes_are_answered(served, prompts):
    generate, _ = served
    many = [prompts[-1]] * (2 * offline.CPU_BATCHED_TOKENS // len(prompts[-1]))
    options = SAMPLING | {"group_size": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    drawn = generate(many, **options, keys=range(len(many)))
    again = generate(many, **options, keys=range(len(many)))
    assert drawn.completions == again.completions
    assert len({tuple(tokens) for tokens in drawn.completions}) > 10


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 0.9, 6)])
def test_log_probabilities_are_those_of_the_distribution_that_is_drawn_from(served, prompts, temperature, top_p, top_k):
    generate, policy = served
    drawn = generate(prompts, **SAMPLING, temperature=temperature, top_p=top_p, top_k=top_k, keys=range(len(prompts)))
    expected_N = engine_logprobs(policy, prompts, drawn.completions, Distribution(temperature, top_p, top_k))
    torch.testing.assert_close(drawn.sampling_logprobs_N, expected_N, atol=TOLERANCE, rtol=0)
    assert any(len({tuple(tokens) for tokens in drawn.completions[at : at + 8]}) > 1 for at in range(0, 80, 8))


def test_a_completion_depends_on_the_seed_and_its_prompts_key_alone(served, prompts):
    generate, _ = served
    options = SAMPLING | {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    together = generate(prompts, **options, keys=range(len(prompts)))
    alone = generate(prompts[3:4], **options, keys=[3])
    other = generate(prompts[3:4], **options | {"seed": 1}, keys=[3])
    assert alone.completions == together.completions[3 * 8 : 4 * 8]
    assert other.completions != alone.completions  # 8 completions of several tokens each


def test_three_engines_agree_on_the_log_probabilities_of_the_same_tokens(model, prompts, tmp_path):
    policy = load_policy(model)
    ours = sample(policy, prompts, **SAMPLING, temperature=1.0, top_p=1.0, top_k=0, keys=range(len(prompts)))
    sequences = [[*prompts[i // 8], *tokens] for i, tokens in enumerate(ours.completions)]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    spec = exam(tmp_path / "score", model, "vllm")
    arguments = opened(spec)._arguments(str(model)) | {"logprobs_mode": "raw_logprobs"}
    told = subprocess.run(
        [str(PYTHON), "-P", "-c", SCORE, json.dumps(arguments), json.dumps(sequences)],
        env={
            **os.environ,
            **offline.ENVIRONMENT,
            **offline.CPU_ENVIRONMENT,
            "PYTHONPATH": str(offline.PROGRAM.parent),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(told.stdout.splitlines()[-1])
    at = 0
    for sequence, tokens, served in zip(sequences, ours.completions, theirs, strict=True):
        with torch.no_grad():
            logits_TV = network(torch.tensor([sequence])).logits[0, :-1]
        reference_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        vllm_T = torch.tensor(served)
        ours_T = ours.sampling_logprobs_N[at : at + len(tokens)]
        torch.testing.assert_close(vllm_T, reference_T, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(ours_T, reference_T[-len(tokens) :], atol=TOLERANCE, rtol=0)
        at += len(tokens)

"""verl's own classes judge what they would be given, before anything starts.

The tests with the real verl share one process of its interpreter, for `import verl` takes seconds.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from backends.verl import examples
from engine.stages import ROOT

from opdctl.backends.verl import render, schema

PYTHON = Path(os.environ.get("OPDCTL_VERL_PYTHON", ROOT / ".venv-verl/bin/python"))
real = pytest.mark.verl
LOSS, T0 = "distillation.distillation_loss", "distillation.teacher_models.t0"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def interpreter(folder: Path, version: str = schema.VERSION, problems: tuple[str, ...] = ()) -> str:
    """A stand-in in an environment of its own: finds the same problems in every stage, and notes that it was asked."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib/python3.11/site-packages/verl-0.9.1.dist-info").mkdir(parents=True)
    answer = {"version": version, "problems": problems}
    body = (
        "import json, sys\n"
        "stages = [stage['stage'] for stage in json.load(open(sys.argv[3]))['stages']]\n"
        f"open({str(folder / 'asked')!r}, 'a').write(' '.join(stages) + '\\n')\n"
        f"answer = {answer!r}\n"
        "answer['problems'] = {stage: list(answer['problems']) for stage in stages}\n"
        "json.dump(answer, open(sys.argv[4], 'w'))\n"
    )
    (folder / "stand_in.py").write_text(body)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/stand_in.py" "$@"\n')
    python.chmod(0o755)
    return str(python)


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []


def spec(python: str, kind: str = "rlvr", **more):
    return examples.spec(kind, workers={"python": python}, **more)


def test_without_an_interpreter_every_stage_is_told_so(tmp_path):
    found = schema.check([spec(str(tmp_path / "none"), stage="a"), spec(str(tmp_path / "none"), "sft", stage="b")])
    assert set(found) == {"a", "b"}
    assert "there is no interpreter" in found["a"][0]
    assert "make verl-env" in found["a"][0]


def test_an_interpreter_without_verl_is_told():
    (line,) = schema.check([spec(sys.executable)]).values()
    assert "No module named 'verl'" in line[0]
    assert f"opdctl needs verl {schema.VERSION}" in line[0]


def test_another_version_of_verl_is_told(tmp_path):
    (line,) = schema.check([spec(interpreter(tmp_path, version="0.8.0"))]).values()
    assert "verl 0.8.0 is installed there; opdctl needs verl 0.9.1" in line[0]


def test_an_interpreter_that_fails_is_told_with_its_last_line(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho cannot load libfoo >&2\nexit 3\n")
    python.chmod(0o755)
    (line,) = schema.check([spec(str(python))]).values()
    assert "ended with 3: cannot load libfoo" in line[0]


def test_a_file_that_is_no_program_is_told(tmp_path):
    python = tmp_path / "python"
    python.write_bytes(b"\x00")
    python.chmod(0o755)
    (line,) = schema.check([spec(str(python))]).values()
    assert "Exec format error" in line[0]


def test_a_raw_override_of_an_owned_key_needs_no_interpreter(tmp_path):
    found = schema.check([spec(str(tmp_path / "none"), raw={"data.train_batch_size": 3})])
    assert list(found.values()) == [
        ["verl.data.train_batch_size: opdctl sets data.train_batch_size from config.rollout.prompts; change it there"]
    ]


def test_all_stages_are_asked_of_one_process(tmp_path):
    python = interpreter(tmp_path)
    assert schema.check([spec(python, stage="a"), spec(python, "sft", stage="b"), spec(python, "opd", stage="c")]) == {}
    assert asked(tmp_path) == ["a b c"]


def test_a_verdict_is_kept_until_something_changes(tmp_path, cache):
    python = interpreter(tmp_path, problems=("x.y: is wrong",))
    for _ in range(2):
        assert schema.check([spec(python, stage="a")]) == {"a": ["verl.x.y: is wrong"]}
    assert asked(tmp_path) == ["a"]
    schema.check([spec(python, stage="a"), spec(python, stage="b", raw={"x.z": 1})])
    assert asked(tmp_path) == ["a", "b"]  # only what is new
    (tmp_path / "lib/python3.11/site-packages/vllm-0.28.0.dist-info").mkdir()
    schema.check([spec(python, stage="a")])
    assert asked(tmp_path) == ["a", "b", "a"]
    assert all(path.is_relative_to(cache / "opdctl" / "verl") for path in cache.rglob("*.json"))


def test_what_is_wrong_with_the_environment_is_not_kept(tmp_path):
    python = interpreter(tmp_path, version="0.8.0")
    for _ in range(2):
        schema.check([spec(python, stage="a")])
    assert asked(tmp_path) == ["a", "a"]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, cache):
    cache.write_text("a file")
    assert schema.check([spec(interpreter(tmp_path))]) == {}


# -------------------------------------------------------------------------------------------------- the real verl


def changed(kind: str, changes: dict[str, str], name: str = "opd-cpu") -> tuple[str, list[str]]:
    """An override list that opdctl would not write."""
    arguments = render.overrides(examples.CASES[name]()).arguments()
    left = [argument for argument in arguments if argument.split("=")[0].lstrip("+") not in changes]
    return kind, left + [f"++{key}={value}" for key, value in changes.items()]


def bare_teacher() -> tuple[str, list[str]]:
    """As one would write it by hand: a path, and what verl insists on."""
    arguments = render.overrides(examples.CASES["opd-cpu"]()).arguments()
    at = f"+{T0}.inference"
    kept = (f"{at}.name=", f"{at}.tensor_model_parallel_size=")
    return "opd", [argument for argument in arguments if not argument.startswith(at) or argument.startswith(kept)]


WRONG: dict[str, tuple[tuple[str, list[str]], str]] = {
    "a pool that is not the sum": (changed("opd", {"distillation.n_gpus_per_node": "3"}), "must match"),
    "top-k beyond the server's limit": (
        changed("opd", {f"{T0}.inference.engine_kwargs.vllm.max_logprobs": "20"}, "opd-topk-cpu"),
        "max_logprobs (20) must be >= distillation_loss topk (64)",
    ),
    "no room for the teacher's own token": (
        changed("opd", {f"{T0}.inference.max_model_len": "127"}),
        "required_context_len=128, max_model_len=127",
    ),
    "a teacher with random weights": (changed("opd", {f"{T0}.inference.load_format": "dummy"}), "random weights"),
    "a teacher without its fields": (bare_teacher(), "random weights"),
    "a teacher under the name that verl drops": (
        changed("opd", {"distillation.teacher_models.teacher_model.key": "t2", "distillation.n_gpus_per_node": "3"}),
        "must match",
    ),
    "k1 back-propagated directly": (
        changed("opd", {f"{LOSS}.loss_mode": "k1"}),
        "Directly backpropagating k1 loss is incorrect",
    ),
    "k3 back-propagated directly": (changed("opd", {f"{LOSS}.loss_mode": "k3"}), "has not the gradient of the KL"),
    "top-k as the reward of a policy gradient": (
        changed("opd", {f"{LOSS}.loss_mode": "forward_kl_topk", f"{LOSS}.use_policy_gradient": "true"}, "opd-topk-cpu"),
        "the gradient is not its own",
    ),
    "our top-k as the reward of a policy gradient": (
        changed("opd", {f"{LOSS}.use_policy_gradient": "true"}, "opd-topk-cpu"),
        "is the whole loss",
    ),
    "a loss that nothing registers": (changed("opd", {f"{LOSS}.loss_mode": "opdctl_none"}), "Unsupported loss mode"),
    "an estimator that nothing registers": (
        changed("rlvr", {"algorithm.adv_estimator": "opdctl_none"}, "rlvr-cpu"),
        "opdctl_none",
    ),
    "sequence parallelism with padding": (
        changed("rlvr", {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": "2"}, "rlvr-cpu"),
        "you must enable `use_remove_padding`",
    ),
    "a schedule that the class does not take": (changed("sft", {"optim.lr_scheduler_type": "wsd"}, "sft-cpu"), "optim"),
    "a text for a number": (changed("rlvr", {"algorithm.gamma": "high"}, "rlvr-cpu"), "'high' is not float"),
}
TYPOS = {  # as the user writes it: behind +, behind ++ or bare
    "+actor_rollout_ref.rolout.seed": "did you mean 'actor_rollout_ref.rollout'?",
    "++data.dataloader_num_worker": "did you mean 'data.dataloader_num_workers'?",
    "trainer.balance_bacth": "did you mean 'trainer.balance_batch'?",
    "actor_rollout_ref.actor.fsdp_config.forward_prefech": "fsdp_config.forward_prefetch'?",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprob": "engine_kwargs.vllm.max_logprobs'?",
    "actor_rollout_ref.rollout.engine_kwargs.vlm.seed": "engine_kwargs.vllm'?",
    "actor_rollout_ref.max_num_batched_tokens": "'actor_rollout_ref.rollout.max_num_batched_tokens'",
    "distillation.teacher_models.t0.inference.repetition_penalt": "inference.repetition_penalty'?",
    "ray_kwargs.ray_init.num_gpu": "did you mean 'ray_kwargs.ray_init.num_gpus'?",
    "algorithm.rollout_correction.rollout_i": "did you mean 'algorithm.rollout_correction.rollout_is'?",
}
ALLOWED = {  # in the dataclass only, in neither but read by name, or handed on as it is
    "actor_rollout_ref.rollout.repetition_penalty": 1.1,
    "distillation.teacher_models.t0.inference.repetition_penalty": 1.0,
    "data.cache_dir": "/cache",
    "actor_rollout_ref.model.override_config.max_window_layers": 3,
    "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size": 16,
    "actor_rollout_ref.actor.optim.override_optimizer_config.fused": True,
    "ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG": "INFO",
    "ray_kwargs.ray_init.logging_level": "info",
    "reward.reward_kwargs.max_resp_len": 3,
    "trainer.v1.sampler.sampler_kwargs.depth": 2,
}


@pytest.fixture(scope="module")
def judged():
    """Every override list of this file, judged at once: name -> problems."""
    if not PYTHON.exists():
        pytest.skip(f"no verl: {PYTHON} does not exist; `make verl-env` makes it, OPDCTL_VERL_PYTHON names another")
    lists: dict[str, tuple[str, list[str]]] = {name: wrong for name, (wrong, _) in WRONG.items()}
    lists |= {name: (made().kind, render.overrides(made()).arguments()) for name, made in examples.CASES.items()}
    for key in TYPOS:
        lists[key] = ("opd", render.overrides(examples.spec("opd", raw={key: 1})).arguments())
    lists["allowed"] = ("opd", render.overrides(examples.spec("opd", raw=ALLOWED)).arguments())
    questions = [{"stage": name, "kind": kind, "arguments": given} for name, (kind, given) in lists.items()]
    # not through `check`, which asks of lists that opdctl writes, and keeps verdicts
    spec_ = examples.spec("opd", workers={"python": str(PYTHON)})
    answer = schema._ask(spec_, questions)
    assert answer["version"] == schema.VERSION, answer
    return answer["problems"]


@real
@pytest.mark.parametrize("name", examples.CASES)
def test_verl_takes_the_pinned_lists(judged, name):
    assert judged[name] == []


@real
@pytest.mark.parametrize("name", WRONG)
def test_verl_refuses(judged, name):
    assert any(WRONG[name][1] in line for line in judged[name]), judged[name]


@real
@pytest.mark.parametrize("key", TYPOS)
def test_a_mistyped_key_is_refused_with_the_nearest(judged, key):
    (line,) = judged[key]
    assert line.startswith(f"{key.lstrip('+')}: verl has no ")
    assert TYPOS[key] in line


@real
def test_keys_that_only_a_dataclass_or_verls_code_knows_are_taken(judged):
    assert judged["allowed"] == []


@real
def test_a_plan_is_checked_without_ray_or_a_gpu_and_keeps_its_verdict(tmp_path):
    if not PYTHON.exists():
        pytest.skip(f"no verl: {PYTHON} does not exist; `make verl-env` makes it")
    specs = [
        spec(str(PYTHON), stage="a", device="cuda", raw={"+trainer.foo": 1}),
        spec(str(PYTHON), "sft", stage="b", device="cuda"),
    ]
    first = schema.check(specs)
    assert first == {"a": ["verl.trainer.foo: verl has no 'foo' in trainer"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("asked again"))
        assert schema.check(specs) == first
    left = [path for path in Path(tempfile.gettempdir()).glob("opdctl-verl-*") if path.owner() == Path.home().owner()]
    assert left == []

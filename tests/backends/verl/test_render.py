"""The rendered command: pinned as a whole, and the properties that the pinned lists do not show."""

import difflib
import os
import shlex
from pathlib import Path

import pytest
from backends.verl import examples
from backends.verl.examples import CASES

from opdctl.backends.verl import render
from opdctl.backends.verl.layout import BOOTSTRAP
from opdctl.backends.verl.overrides import Overrides
from opdctl.backends.verl.render_opd import teacher_pool
from opdctl.errors import ConfigError
from opdctl.settings import Resources

GOLDEN = Path(__file__).with_name("golden")
RENEW = "OPDCTL_RENEW_GOLDEN"
STATED = {  # of each teacher's `inference`, which starts from a dataclass with random weights and lengths of 512
    "name", "mode", "load_format", "dtype", "seed", "prompt_length", "response_length", "max_model_len",
    "tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size",
    "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill",
    "enable_prefix_caching", "enforce_eager", "free_cache_engine", "enable_sleep_mode", "logprobs_mode",
    "scheduling_policy", "ignore_eos", "disable_log_stats", "skip_tokenizer_init", "full_determinism",
    "temperature", "top_p", "top_k", "n",
}  # fmt: skip


def values(spec) -> dict[str, str]:
    """Key -> value, as written."""
    pairs = (argument.split("=", 1) for argument in render.overrides(spec).arguments())
    return {key.lstrip("+"): value for key, value in pairs}


def text(spec) -> str:
    command = render.command(spec)
    lines = [f"{name}={value}" for name, value in command.environment.items()] + list(command.argv)
    return "\n".join(lines).replace(str(BOOTSTRAP), "BOOTSTRAP") + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_command_is_the_pinned_one(name):
    path, made = GOLDEN / f"{name}.txt", text(CASES[name]())
    if os.environ.get(RENEW):
        path.write_text(made)
    pinned = path.read_text() if path.exists() else ""
    difference = "\n".join(
        difflib.unified_diff(pinned.splitlines(), made.splitlines(), "pinned", "rendered", "", "", 1)
    )
    assert made == pinned, (
        f"{name}: what verl is given has changed. If that is meant, `{RENEW}=1 make test`, look at the diff of "
        f"{GOLDEN.name}/, and raise opdctl.backends.verl.REVISION where results change.\n{difference}"
    )


@pytest.mark.parametrize("name", CASES)
def test_no_key_is_given_twice(name):
    keys = [argument.split("=")[0].lstrip("+") for argument in render.overrides(CASES[name]()).arguments()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", CASES)
def test_a_shell_reads_the_command_back(name):
    command = render.command(CASES[name]())
    words = shlex.split(command.shell().replace(" \\\n  ", " "))
    environment = [f"{key}={value}" for key, value in command.environment.items()]
    assert words == environment + list(command.argv)


# --------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize(("prompt", "completion"), [(1, 1), (16, 11), (1024, 8192)])
@pytest.mark.parametrize("kind", ["rlvr", "opd"])
def test_a_served_model_has_room_for_prompt_completion_and_a_teachers_own_token(kind, prompt, completion):
    rollout = examples.ROLLOUT | {"max_prompt_tokens": prompt, "max_completion_tokens": completion}
    found = values(examples.spec(kind, {"rollout": rollout}))
    served = [key.removesuffix(".max_model_len") for key in found if key.endswith(".max_model_len")]
    assert len(served) == (3 if kind == "opd" else 1)
    for at in served:
        assert (found[f"{at}.prompt_length"], found[f"{at}.response_length"]) == (str(prompt), str(completion))
        assert int(found[f"{at}.max_model_len"]) >= prompt + completion + 1


# ---------------------------------------------------------------------------------------------------------- steps


def test_verls_steps_are_rollout_batches_of_several_optimizer_steps():
    config = {"train": examples.train(max_steps=12, save_every=6, global_batch_size=16, optimizer={"warmup_steps": 5})}
    found = values(examples.spec("rlvr", config))
    assert found["trainer.total_training_steps"] == "3"  # 16 prompts x 4 / 16 = 4 optimizer steps a batch
    assert found["trainer.save_freq"] == "1"
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == "4"  # in prompts
    assert found["actor_rollout_ref.actor.optim.lr_warmup_steps"] == "2"


def test_sft_counts_as_opdctl_does():
    found = values(examples.spec("sft"))
    assert (found["trainer.total_training_steps"], found["trainer.save_freq"]) == ("8", "4")


@pytest.mark.parametrize(
    ("kl", "in_loss", "in_reward"),
    [
        ({}, "false", "false"),
        ({"estimator": "k3", "coef": 0.1}, "true", "false"),
        ({"estimator": "k1", "coef": 0.1, "placement": "reward"}, "false", "true"),
    ],
)
def test_the_kl_goes_where_the_settings_place_it(kl, in_loss, in_reward):
    found = values(examples.spec("rlvr", {"kl": kl}))
    assert found["actor_rollout_ref.actor.use_kl_loss"] == in_loss
    assert found["algorithm.use_kl_in_reward"] == in_reward


def test_top_k_0_is_off():
    assert values(examples.spec("rlvr"))["actor_rollout_ref.rollout.top_k"] == "-1"


# -------------------------------------------------------------------------------------------------------- teachers


@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("teachers", range(1, 10))
@pytest.mark.parametrize("alone", [True, False])
def test_the_teacher_pool_is_what_the_teachers_take(teachers, replicas, parallel, alone):
    resources = {"teacher_replicas": replicas, "teacher_tensor_parallel": parallel, "gpus_per_node": 4}
    per_node, nodes = teacher_pool(teachers, Resources.model_validate({"verl": resources}), alone=alone)
    assert per_node * nodes == teachers * replicas * parallel
    assert per_node % parallel == 0  # no server reaches over the end of a node
    assert nodes == 1 if alone else per_node <= 4


@pytest.mark.parametrize("teachers", range(1, 10))
def test_the_rendered_pool_is_the_sum_over_the_rendered_teachers(teachers):
    verl = {"teacher_replicas": 2, "teacher_tensor_parallel": 2}
    found = values(examples.spec("opd", teachers=teachers, device="cuda", verl=verl))
    at = "distillation.teacher_models.t{}"
    taken = [
        int(found[at.format(i) + ".num_replicas"])
        * int(found[at.format(i) + ".inference.tensor_model_parallel_size"])
        * int(found[at.format(i) + ".inference.data_parallel_size"])
        * int(found[at.format(i) + ".inference.pipeline_model_parallel_size"])
        for i in range(teachers)
    ]
    assert int(found["distillation.n_gpus_per_node"]) * int(found["distillation.nnodes"]) == sum(taken)


def test_every_teacher_states_every_field_and_none_has_the_name_that_verl_drops():
    found = values(examples.spec("opd", teachers=3))
    at = "distillation.teacher_models."
    names = {key.removeprefix(at).split(".")[0] for key in found if key.startswith(at)}
    assert names == {"t0", "t1", "t2"}
    for name in names:
        fields = {
            key.removeprefix(f"{at}{name}.inference.") for key in found if key.startswith(f"{at}{name}.inference.")
        }
        assert fields >= STATED
        assert found[f"{at}{name}.inference.load_format"] == "auto"
        assert found[f"{at}{name}.key"] == name


def test_a_server_gives_as_many_log_probs_as_the_loss_reads():
    found = values(examples.spec("opd", {"loss": {"form": "topk", "k": 64}}))
    limits = [int(value) for key, value in found.items() if key.endswith("max_logprobs")]
    assert limits == [64, 64]
    assert found["distillation.distillation_loss.topk"] == "64"


@pytest.mark.parametrize("loss", [{"form": "topk", "k": 8}, {"form": "policy_gradient", "max_advantage": 5.0}])
def test_the_plug_ins_loss_is_the_whole_loss(loss):
    found, at = values(examples.spec("opd", {"loss": loss})), "distillation.distillation_loss"
    assert found[f"{at}.loss_mode"].startswith("opdctl_")
    assert (found[f"{at}.use_policy_gradient"], found[f"{at}.use_task_rewards"]) == ("false", "false")
    assert found[f"{at}.loss_max_clamp"] == "null"


# ---------------------------------------------------------------------------------------------------- where it runs


def test_processes_of_an_existing_cluster_are_given_the_environment_and_the_interpreter():
    spec = examples.spec("rlvr", device="cuda", workers={"ray_address": "head:6379"})
    found, at = values(spec), "ray_kwargs.ray_init"
    assert found[f"{at}.address"] == "'head:6379'" or found[f"{at}.address"] == "head:6379"
    for name in render.environment(spec):
        assert f"{at}.runtime_env.env_vars.{name}" in found
    assert found[f"{at}.runtime_env.env_vars.HF_HUB_OFFLINE"] == "'1'"  # Ray takes texts only
    assert found[f"{at}.runtime_env.py_executable"] == "/envs/verl/bin/python"
    assert f"{at}.num_gpus" not in found


def test_a_ray_of_its_own_has_a_slot_for_every_rank_and_teacher_on_a_cpu():
    found = values(examples.spec("opd", teachers=3, verl={"gpus_per_node": 2}))
    assert found["ray_kwargs.ray_init.num_gpus"] == "5"


def test_weights_and_optimizer_are_float32_whatever_the_precision():
    found = values(examples.spec("sft", {"train": examples.train(precision="bfloat16")}, device="cuda"))
    assert (found["engine.model_dtype"], found["engine.dtype"]) == ("fp32", "bfloat16")
    assert found["engine.mixed_precision"] == "{param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"


def test_megatron_is_told_of_betas_and_eps_where_verl_does_not_hand_them_on():
    train = examples.train(precision="bfloat16", optimizer={"betas": [0.8, 0.9], "eps": 1e-6})
    found = values(examples.spec("sft", {"train": train}, device="cuda", verl={"strategy": "megatron"}))
    given = {
        name: found[f"optim.override_optimizer_config.{name}"] for name in ("adam_beta1", "adam_beta2", "adam_eps")
    }
    assert given == {"adam_beta1": "0.8", "adam_beta2": "0.9", "adam_eps": "1e-06"}


# ----------------------------------------------------------------------------------------------------- raw overrides


def test_a_raw_override_reaches_verl():
    spec = examples.spec("rlvr", raw={"actor_rollout_ref.rollout.agent.num_workers": 3})
    assert render.overrides(spec).arguments()[-1] == "++actor_rollout_ref.rollout.agent.num_workers=3"


@pytest.mark.parametrize(
    ("key", "source"),
    [
        ("data.train_batch_size", "from config.rollout.prompts; change it there"),
        ("trainer.total_training_steps", "from config.train.max_steps; change it there"),
        ("trainer.logger", "itself: opdctl reads verl's log, and is the only writer to MLflow"),
        ("trainer.default_local_dir", "itself: opdctl finds saves and logs in the stage's folder"),
        ("distillation.teacher_models.t0.inference.load_format", "from inputs.teachers; change it there"),
        ("distillation.teacher_models.t0.inference.engine_kwargs.vllm.max_logprobs", "from config.loss; change it"),
        ("distillation.n_gpus_per_node", "from resources.verl.teacher_replicas; change it there"),
    ],
)
def test_a_raw_override_of_what_opdctl_sets_is_refused(key, source):
    with pytest.raises(ConfigError, match=f"opdctl sets {key} {source}"):
        render.command(examples.spec("opd", raw={key: 1}))


def test_a_key_is_not_set_by_two_settings():
    overrides = Overrides()
    overrides.own("a", {"x": 1})
    with pytest.raises(AssertionError, match="x is set twice"):
        overrides.own("b", {"+x": 2})

"""What a backend cannot do of a stage's settings is told before launch, by key, with a way out."""

import pytest
from recipes import recipe, tree

from opdctl.errors import ConfigError
from opdctl.pipeline import expand

VERL = {  # every stage on verl, and nothing wrong with it
    "stages.sft.backend": "verl",
    "stages.max.backend": "verl",
    "stages.fuse.backend": "verl",
    "stages.eval.backend": "vllm",
    "stages.fuse.config.loss": {"form": "topk", "k": 4},
    "machine": {"slots": 1, "cpus": 2, "gpus": 16},
}
MEGATRON = {
    "stages.max.resources.verl": {"strategy": "megatron", "gpus_per_node": 4, "tensor_parallel": 2},
    "stages.max.config.train.precision": "bfloat16",
}
LONG = {"stages.max.config.rollout.max_completion_tokens": 112}
KL = {"stages.max.config.kl": {"estimator": "k3", "coef": 0.1}}
PG = {"stages.fuse.config.loss": {"form": "policy_gradient", "max_advantage": None}}

BAD = [
    ({"stages.eval.backend": "verl"}, "eval.backend", "needs backend: vllm or embedded"),
    ({"stages.sft.backend": "vllm"}, "sft.backend", "needs backend: embedded or verl"),
    ({"stages.sft.backend": "embedded", "stages.sft.verl": {"a": 1}}, "sft.verl", "this stage has backend: embedded"),
    ({"stages.fuse.config.loss": {"form": "full_vocab"}}, "fuse.config.loss.form", "backend: embedded computes it"),
    ({"stages.fuse.config.rollout.temperature": 0.7}, "fuse.config.rollout.temperature", "compares at 1"),
    ({"stages.max.config.dynamic_sampling": {"max_rounds": 3}}, "max.config.dynamic_sampling", "embedded has it"),
    ({"stages.max.config.overlong": {"handling": "mask"}}, "max.config.overlong.handling", "take soft_penalty"),
    (KL | {"stages.max.inputs.reference": "model:"}, "max.inputs.reference", "model:, and verl's reference is the"),
    ({"stages.max.config.train.global_batch_size": 2}, "max.config.train.global_batch_size", "no multiple of rollout."),
    (MEGATRON | {"stages.max.config.train.precision": "float32"}, "max.config.train.precision", "trains in bfloat16"),
    ({"stages.fuse.resources.verl": {"strategy": "megatron"}}, "fuse.resources.verl.strategy", "take fsdp2"),
    # losses
    ({"stages.max.config.mismatch": {"rule": "opsm", "delta": 0.1}}, "max.config.mismatch.rule", "has tis and icepop"),
    (
        {"stages.max.config.mismatch": {"rule": "sequence_mask", "low": 0.9, "high": 1.1}},
        "max.config.mismatch.rule",
        "embedded has it",
    ),
    ({"stages.max.config.mismatch": {"rule": "tis", "cap": 5.0, "floor": 0.2}}, "max.config.mismatch.floor", "take 0"),
    (PG | {"stages.fuse.config.loss.discount": 0.9}, "fuse.config.loss.discount", "backend: embedded has"),
    (PG | {"stages.fuse.config.loss.margin": {"margin": 0.4}}, "fuse.config.loss.margin", "backend: embedded has"),
    ({"stages.fuse.config.balance": True}, "fuse.config.balance", "backend: embedded has"),
    ({"stages.fuse.resources.teacher_states": "cached"}, "fuse.resources.teacher_states", "backend: embedded caches"),
    ({"stages.fuse.config.sampled_by": "teacher"}, "fuse.config.sampled_by", "backend: embedded has"),
    ({"stages.fuse.config.loss": {"form": "forward_kl"}}, "fuse.config.loss.form", "forward_kl needs all of a teacher"),
    ({"stages.fuse.config.loss": {"form": "jsd", "beta": 0.5}}, "fuse.config.loss.form", "jsd needs all of a teacher"),
    # parallelism
    (
        {"stages.sft.resources.verl": {"gpus_per_node": 4, "sequence_parallel": 3}},
        "sft.resources.verl.sequence_parallel",
        "which does not divide the 4 of the trainer",
    ),
    (
        {"stages.sft.resources.verl": {"gpus_per_node": 3}},
        "sft.config.train.global_batch_size",
        "8, and 3 data-parallel groups of GPUs cannot share it evenly",
    ),
    ({"stages.sft.resources.verl": {"tensor_parallel": 2}}, "sft.resources.verl.tensor_parallel", "megatron does"),
    (
        {"stages.max.resources.verl": {"gpus_per_node": 4, "rollout_tensor_parallel": 3}},
        "max.resources.verl.rollout_tensor_parallel",
        "3 does not divide the 4 GPUs",
    ),
    (
        MEGATRON | {"stages.max.resources.verl": {"strategy": "megatron", "gpus_per_node": 4, "expert_parallel": 3}},
        "max.resources.verl.expert_parallel",
        "3 does not divide the 4 GPUs",
    ),
    # machines
    ({"stages.sft.resources.verl": {"nodes": 2}}, "sft.resources.verl.nodes", "SFT runs on one node"),
    ({"stages.max.resources.verl": {"nodes": 2}}, "max.resources.verl.nodes", "set workers.verl.ray_address"),
    (MEGATRON | {"workers.verl": {"device": "cpu"}}, "max.resources.verl.strategy", "megatron needs GPUs"),
    (
        {"workers.verl": {"device": "cpu"}, "stages.sft.resources.verl": {"gpus_per_node": 2, "sequence_parallel": 2}},
        "sft.resources.verl.sequence_parallel",
        "workers.verl.device is cpu",
    ),
    # lengths
    (LONG, "max.config.rollout.max_completion_tokens", "max_position_embeddings is 128"),
    ({"stages.max.resources.micro_batch_tokens": 26}, "max.resources.micro_batch_tokens", "= 27), which verl never"),
    ({"stages.sft.resources.micro_batch_tokens": 64}, "sft.resources.micro_batch_tokens", "config.max_tokens = 4096"),
    ({"stages.max.resources.verl": {"max_batched_tokens": 128}}, "max.resources.verl.max_num_seqs", "vLLM refuses it"),
]
GOOD = [
    {},
    MEGATRON,
    KL | {"stages.max.inputs.reference": "stage:sft"},  # the model that it starts from
    {"stages.max.resources.verl": {"nodes": 2}, "workers.verl": {"ray_address": "head:6379"}},
    {"stages.max.resources": {"micro_batch_tokens": 14, "verl": {"gpus_per_node": 2, "sequence_parallel": 2}}},
    {"stages.max.config.rollout.max_completion_tokens": 111},  # one position is left for a teacher's own token
    {"stages.sft.config.train.optimizer.schedule": "wsd"},  # the plug-in's
]


@pytest.mark.parametrize(("changes", "key", "text"), BAD, ids=[f"{key}: {text}" for _, key, text in BAD])
def test_what_the_backend_cannot_do_is_told(changes, key, text):
    with pytest.raises(ConfigError) as caught:
        expand(tree(VERL | changes))
    assert any(line.startswith(f"stages.{key}") and text in line for line in caught.value.problems), caught.value


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_what_the_backend_can_do_passes(changes):
    assert set(recipe(VERL | changes).stages) == {"sft", "max[domain=math]", "max[domain=code]", "fuse", "eval"}


def test_the_embedded_backend_does_all_of_it():
    unlike_verl = {
        "stages.max.config.dynamic_sampling": {"max_rounds": 3},
        "stages.max.config.overlong": {"handling": "mask"},
        "stages.fuse.config.rollout.temperature": 0.7,
        "stages.fuse.config.train.global_batch_size": 1,
        "stages.fuse.config.train.max_steps": 8,
        "stages.fuse.config.train.save_every": 8,
    }
    assert recipe(unlike_verl).stages["fuse"].settings.backend == "embedded"

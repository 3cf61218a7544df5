"""The overrides of verl's PPO trainer: what RL and on-policy distillation have in common, and RL itself."""

from collections.abc import Mapping
from typing import Any

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.backends.verl import render_engine, render_policy_loss
from opdctl.backends.verl.layout import IMAGES, layout
from opdctl.backends.verl.overrides import Overrides
from opdctl.backends.verl.render_engine import on_cpu, verl_seed
from opdctl.settings import Kl, OpdSettings, Resources, RlvrSettings
from opdctl.workers import VerlResources

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
REWARD_MANAGER = ("pkg://opdctl.backends.verl.plugin.rewards", "OpdctlRewardManager")
CPU_KV_CACHE = 64 * 2**20  # bytes of a CPU engine's KV cache; vLLM's own variable for it gives 1 GiB at least

_AGGREGATION = {
    "sequence_mean": "seq-mean-token-mean",
    "token_mean": "token-mean",
    "constant": "seq-mean-token-sum-norm",
}


def rlvr(spec: StageSpec) -> Overrides:
    """Of a stage of kind rlvr."""
    settings, resources = RlvrSettings.model_validate(spec.config), Resources.model_validate(spec.resources)
    overrides = Overrides()
    init = next(given for given in spec.inputs if given.role == "init")
    common(overrides, spec, settings, resources, init)
    # the plug-in's estimators: verl's grpo and rloo, but exactly 0 for equal rewards
    overrides.own("config.advantage", {"algorithm.adv_estimator": f"opdctl_{settings.advantage}"})
    render_policy_loss.surrogate(overrides, settings.surrogate, ACTOR, "config.surrogate")
    render_policy_loss.mismatch(overrides, settings.mismatch, "config.mismatch", asynchronous=is_async(resources))
    _kl(overrides, settings.kl)
    overrides.own("kind", {"distillation.enabled": False})
    return overrides


def _kl(overrides: Overrides, kl: Kl) -> None:
    """verl's reference is the model that the actor starts from."""
    estimator = "k1" if kl.estimator == "none" else kl.estimator
    in_loss = kl.estimator != "none" and kl.placement == "loss"
    in_reward = kl.estimator != "none" and kl.placement == "reward"
    overrides.own(
        "config.kl",
        {
            f"{ACTOR}.use_kl_loss": in_loss,
            f"{ACTOR}.kl_loss_type": estimator,
            f"{ACTOR}.kl_loss_coef": kl.coef,
            "algorithm.use_kl_in_reward": in_reward,
            "algorithm.kl_penalty": estimator,
            "algorithm.kl_ctrl.type": "fixed",
            "algorithm.kl_ctrl.kl_coef": kl.coef,
        },
    )


# ---------------------------------------------------------------------------------------------------------- common


def common(
    overrides: Overrides,
    spec: StageSpec,
    settings: RlvrSettings | OpdSettings,
    resources: Resources,
    init: InputSpec,
) -> None:
    """All but advantage, clip, KL and teachers; `init` is the model that is trained."""
    if resources.verl.strategy == "megatron":
        overrides.own("resources.verl.strategy", {"model_engine": "megatron"})
    render_engine.model(overrides, spec, "actor_rollout_ref.model", init)
    _data(overrides, spec, settings)
    _actor(overrides, spec, settings, resources)
    _reference(overrides, spec, settings, resources)
    _rollout(overrides, spec, settings, resources)
    _rewards(overrides, spec)
    _trainer(overrides, spec, settings, resources)


def updates_of(spec: StageSpec) -> int:
    """Optimizer steps in one step of verl's, which is a rollout batch, or in SFT one optimizer step."""
    match spec.kind:
        case "sft":
            return 1
        case "opd":
            return OpdSettings.model_validate(spec.config).updates
    return RlvrSettings.model_validate(spec.config).updates


def _data(overrides: Overrides, spec: StageSpec, settings: RlvrSettings | OpdSettings) -> None:
    files, rollout = layout(spec), settings.rollout
    overrides.own("config.rollout.prompts", {"data.train_batch_size": rollout.prompts})
    overrides.own(
        "config.rollout.max_prompt_tokens",
        {
            "data.max_prompt_length": rollout.max_prompt_tokens,
            "data.truncation": "error",
            "data.filter_overlong_prompts": False,
        },
    )
    overrides.own("config.rollout.max_completion_tokens", {"data.max_response_length": rollout.max_completion_tokens})
    overrides.own(
        "config.data",
        {
            "data.train_files": str(files.train),
            "data.val_files": str(files.validation),
            "data.train_max_samples": -1,
            "data.val_max_samples": -1,
            "data.prompt_key": "prompt",
            "data.reward_fn_key": "data_source",
            "data.return_raw_chat": True,
            "data.image_key": IMAGES,
            "data.shuffle": False,  # dealt by opdctl, in order
            "data.validation_shuffle": False,
            "data.seed": verl_seed(spec),
            "data.custom_cls.path": None,
        },
    )
    overrides.choose({"data.dataloader_num_workers": 0, "data.use_shm": False, "data.trust_remote_code": False})


def _actor(overrides: Overrides, spec: StageSpec, settings: RlvrSettings | OpdSettings, resources: Resources) -> None:
    train, verl, cpu = settings.train, resources.verl, on_cpu(spec)
    overrides.own(
        "config.train.global_batch_size",
        {
            f"{ACTOR}.ppo_mini_batch_size": train.global_batch_size // settings.rollout.group_size,  # in prompts
            f"{ACTOR}.ppo_epochs": 1,
            # a batch comes in the order in which completions ended: unshuffled, its first step is on the short ones
            f"{ACTOR}.shuffle": settings.updates > 1,
        },
    )
    overrides.own(
        "resources.micro_batch_tokens",
        {
            f"{ACTOR}.use_dynamic_bsz": True,
            f"{ACTOR}.ppo_max_token_len_per_gpu": resources.micro_batch_tokens,
            f"{REF}.log_prob_use_dynamic_bsz": True,
            f"{REF}.log_prob_max_token_len_per_gpu": resources.micro_batch_tokens,
            f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu": resources.micro_batch_tokens,
        },
    )
    constant = settings.rollout.max_completion_tokens if settings.aggregation == "constant" else None
    overrides.own(
        "config.aggregation",
        {f"{ACTOR}.loss_agg_mode": _AGGREGATION[settings.aggregation], f"{ACTOR}.loss_scale_factor": constant},
    )
    overrides.own("seed", {f"{ACTOR}.data_loader_seed": verl_seed(spec)})
    megatron = verl.strategy == "megatron"
    overrides.own("resources.verl.strategy", {f"{ACTOR}.strategy": verl.strategy})
    if megatron:
        render_engine.apply(overrides, render_engine.megatron(spec, resources, train.precision, f"{ACTOR}.megatron"))
    else:
        overrides.own(
            "resources.verl.sequence_parallel",
            {f"{ACTOR}.ulysses_sequence_parallel_size": verl.sequence_parallel},
        )
        render_engine.apply(overrides, render_engine.fsdp(spec, resources, train.precision, f"{ACTOR}.fsdp_config"))
    render_engine.optimizer(overrides, train, f"{ACTOR}.optim", megatron=megatron, updates=settings.updates)
    render_engine.checkpoint(overrides, f"{ACTOR}.checkpoint")
    overrides.own("opdctl resumes from and publishes what verl saves", {f"{ACTOR}.checkpoint.async_save": False})
    overrides.choose(
        {
            f"{ACTOR}.entropy_coeff": 0.0,
            f"{ACTOR}.calculate_entropy": False,
            f"{ACTOR}.entropy_from_logits_with_chunking": not cpu,  # else a second copy of all logits
            f"{ACTOR}.use_torch_compile": not cpu,
        }
    )


def _reference(
    overrides: Overrides, spec: StageSpec, settings: RlvrSettings | OpdSettings, resources: Resources
) -> None:
    """verl makes a reference model only where a KL term asks for one; a Megatron one copies the actor's sharding."""
    if resources.verl.strategy == "megatron":
        overrides.own("config.train.precision", {f"{REF}.megatron.dtype": settings.train.precision})
        return
    groups = render_engine.fsdp(spec, resources, settings.train.precision, f"{REF}.fsdp_config")
    render_engine.apply(overrides, groups | {"resources.verl.offload": {f"{REF}.fsdp_config.param_offload": False}})


def _rollout(overrides: Overrides, spec: StageSpec, settings: RlvrSettings | OpdSettings, resources: Resources) -> None:
    own, verl, cpu = settings.rollout, resources.verl, on_cpu(spec)
    overrides.own("config.rollout.group_size", {f"{ROLLOUT}.n": own.group_size})
    overrides.own(
        "config.rollout.temperature", {f"{ROLLOUT}.temperature": own.temperature, f"{ROLLOUT}.do_sample": True}
    )
    overrides.own("opdctl compares the policy with the sampler", {f"{ROLLOUT}.calculate_log_probs": True})
    overrides.own("config.rollout.top_p", {f"{ROLLOUT}.top_p": own.top_p})
    overrides.own("config.rollout.top_k", {f"{ROLLOUT}.top_k": own.top_k or -1})
    overrides.own("config.train.precision", {f"{ROLLOUT}.dtype": settings.train.precision})
    overrides.own("seed", {f"{ROLLOUT}.seed": verl_seed(spec)})
    split(overrides, verl, ROLLOUT, ("rollout_tensor_parallel", verl.rollout_tensor_parallel))
    overrides.own("kind", {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.load_format": "dummy"})
    overrides.own("config.rollout", lengths(own.max_prompt_tokens, own.max_completion_tokens, ROLLOUT))
    serving(overrides, spec, resources, ROLLOUT, memory=("rollout_memory", verl.rollout_memory))
    overrides.choose(
        {
            f"{ROLLOUT}.free_cache_engine": not cpu,
            f"+{ROLLOUT}.enable_sleep_mode": not cpu,
            f"{ROLLOUT}.multi_turn.enable": own.turns is not None,
            f"{ROLLOUT}.agent.num_workers": 1 if cpu else 8,
            f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent",
            f"{ROLLOUT}.checkpoint_engine.backend": "naive",
            # the largest tensor, of shared memory on a CPU, has to fit
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 256 if cpu else 2048,
        }
    )


def split(overrides: Overrides, verl: VerlResources, at: str, tensor: tuple[str, int], plus: str = "") -> None:
    """A served model over GPUs; `tensor` is a key of `resources.verl` and its value. Experts go over the same GPUs."""
    overrides.own(
        f"resources.verl.{tensor[0]}",
        {
            f"{plus}{at}.tensor_model_parallel_size": tensor[1],
            f"{plus}{at}.data_parallel_size": 1,
            f"{plus}{at}.pipeline_model_parallel_size": 1,
        },
    )
    spread = tensor[1] if verl.expert_parallel > 1 else 1
    overrides.own("resources.verl.expert_parallel", {f"{plus}{at}.expert_parallel_size": spread})


def lengths(prompt: int, completion: int, at: str, plus: str = "") -> Mapping[str, Any]:
    return {
        f"{plus}{at}.prompt_length": prompt,
        f"{plus}{at}.response_length": completion,
        f"{plus}{at}.max_model_len": prompt + completion + 1,  # verl asks a teacher for one token more
    }


def serving(
    overrides: Overrides,
    spec: StageSpec,
    resources: Resources,
    at: str,
    *,
    memory: tuple[str, float],
    plus: str = "",
) -> None:
    """The vLLM engine of rollouts or of a teacher; `memory` is a key of `resources.verl` and its value."""
    verl, cpu = resources.verl, on_cpu(spec)
    overrides.own(f"resources.verl.{memory[0]}", {f"{plus}{at}.gpu_memory_utilization": memory[1]})
    overrides.own("resources.verl.max_num_seqs", {f"{plus}{at}.max_num_seqs": verl.max_num_seqs})
    overrides.own("resources.verl.max_batched_tokens", {f"{plus}{at}.max_num_batched_tokens": verl.max_batched_tokens})
    overrides.choose(
        {
            f"{plus}{at}.enable_chunked_prefill": True,
            f"{plus}{at}.enable_prefix_caching": True,
            f"{plus}{at}.enforce_eager": cpu,
            f"{plus}{at}.logprobs_mode": "processed_logprobs",
            f"{plus}{at}.scheduling_policy": "fcfs",
            f"{plus}{at}.ignore_eos": False,
            f"{plus}{at}.disable_log_stats": True,
            f"{plus}{at}.skip_tokenizer_init": True,
            f"{plus}{at}.full_determinism": False,
        }
    )
    if cpu:
        overrides.choose({f"+{at}.engine_kwargs.vllm.kv_cache_memory_bytes": CPU_KV_CACHE})


def _rewards(overrides: Overrides, spec: StageSpec) -> None:
    path, name = REWARD_MANAGER
    overrides.own(
        "tasks.*.verifier",
        {
            "reward.reward_manager.source": "importlib",
            "reward.reward_manager.module.path": path,
            "reward.reward_manager.name": name,
            "reward.custom_reward_function.path": None,
            "reward.reward_model.enable": False,
        },
    )
    overrides.choose({"reward.num_workers": 1 if on_cpu(spec) else 8})


def _trainer(overrides: Overrides, spec: StageSpec, settings: RlvrSettings | OpdSettings, resources: Resources) -> None:
    render_engine.trainer(overrides, spec, settings.train, resources, updates=settings.updates)
    # opdctl deletes old saves: verl would do it before the new one is whole
    overrides.own("resources.verl.keep_last", {"trainer.max_actor_ckpt_to_keep": None})
    overrides.own(
        "opdctl finds saves and logs in the stage's folder",
        render_engine.saves(spec) | {"trainer.del_local_ckpt_after_load": False},
    )
    overrides.own(
        "opdctl reads verl's log, and is the only writer to MLflow",
        render_engine.log(spec) | {"trainer.log_val_generations": 0},
    )
    overrides.own(
        "opdctl evaluates in stages of its own",
        {"trainer.test_freq": -1, "trainer.val_before_train": False, "trainer.val_only": False},
    )
    overrides.own("kind", {"trainer.use_v1": True, "critic.enable": False, "trainer.critic_warmup": 0})
    _mode(overrides, is_async(resources))
    overrides.choose(
        {
            "trainer.balance_batch": True,
            "trainer.rollout_data_dir": None,
            "algorithm.gamma": 1.0,
            "algorithm.lam": 1.0,
            "algorithm.use_pf_ppo": False,
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1 if on_cpu(spec) else 8,
        }
    )


def is_async(resources: Resources) -> bool:
    """Do rollouts of the next batch go on while the trainer learns?"""
    return resources.verl.mode == "async"


def _mode(overrides: Overrides, asynchronous: bool) -> None:
    overrides.own(
        "resources.verl.mode",
        {
            "trainer.v1.trainer_mode": "colocate_async" if asynchronous else "sync",
            "data.gen_batch_size": 1 if asynchronous else None,
        },
    )
    overrides.own(
        "config.dynamic_sampling",
        {"algorithm.filter_groups.enable": False, "trainer.v1.sampler.sync_refill_failed_groups": False},
    )
    overrides.choose(
        {
            "trainer.v1.colocate_async.num_warmup_batches": 1,
            "trainer.v1.sampler.max_off_policy_threshold": 8,
            "trainer.v1.sampler.max_off_policy_strategy": "drop",
        }
    )

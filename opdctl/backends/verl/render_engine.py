"""Settings of verl's training engines, the same for SFT, RL and distillation: model, optimizer, sharding, precision."""

import math
from collections.abc import Mapping
from typing import Any

from opdctl.backends.contract import InputSpec, StageSpec
from opdctl.backends.verl.layout import has_images, layout
from opdctl.backends.verl.overrides import Overrides
from opdctl.backends.verl.templates import VERBATIM
from opdctl.settings import Optimizer, Resources, Train

SAVED = ["model", "optimizer", "extra"]  # what verl resumes from; besides it writes weights in Hugging Face format
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def on_cpu(spec: StageSpec) -> bool:
    return bool(spec.workers["device"] == "cpu")


def verl_seed(spec: StageSpec) -> int:
    """The stage's seed where verl, vLLM and numpy each take it."""
    return spec.seed % 2**31


def model_path(spec: StageSpec, given: InputSpec) -> str:
    """Folder of a model, which for a new one is made before verl starts."""
    return given.path or str(layout(spec).new_model)


def model(overrides: Overrides, spec: StageSpec, at: str, given: InputSpec) -> None:
    """`at`: verl's prefix, as `model`."""
    cpu = on_cpu(spec)
    overrides.own(f"inputs.{given.role}", {f"{at}.path": model_path(spec, given), f"{at}.tokenizer_path": None})
    template = None if has_images(spec) else VERBATIM
    overrides.own("tasks.*.template", {f"{at}.custom_chat_template": template})
    overrides.own("workers.verl.device", {f"{at}.use_remove_padding": not cpu})  # needs flash attention
    overrides.choose(
        {
            f"+{at}.override_config.attn_implementation": "sdpa" if cpu else "flash_attention_2",
            f"{at}.enable_gradient_checkpointing": not cpu or bool(spec.resources["gradient_checkpointing"]),
            f"{at}.enable_activation_offload": False,
            f"{at}.use_fused_kernels": False,
            f"{at}.use_liger": False,
            f"{at}.use_shm": False,
            f"{at}.trust_remote_code": False,
            f"{at}.external_lib": None,
            f"{at}.lora_rank": 0,
            f"{at}.lora_adapter_path": None,
        }
    )


def checkpoint(overrides: Overrides, at: str) -> None:
    overrides.own(
        "opdctl resumes from and publishes what verl saves",
        {f"{at}.save_contents": [*SAVED, "hf_model"], f"{at}.load_contents": SAVED},
    )


def trainer(overrides: Overrides, spec: StageSpec, train: Train, resources: Resources, updates: int = 1) -> None:
    """verl counts steps of its own, each of `updates` optimizer steps."""
    overrides.own("workers.verl.device", {"trainer.device": spec.workers["device"]})
    overrides.own("resources.verl.nodes", {"trainer.nnodes": resources.verl.nodes})
    overrides.own("resources.verl.gpus_per_node", {"trainer.n_gpus_per_node": resources.verl.gpus_per_node})
    overrides.own(
        "config.train.max_steps",
        {"trainer.total_training_steps": train.max_steps // updates, "trainer.total_epochs": 1},
    )
    overrides.own("config.train.save_every", {"trainer.save_freq": train.save_every // updates})


def saves(spec: StageSpec) -> dict[str, Any]:
    return {
        "trainer.default_local_dir": str(layout(spec).checkpoints),
        "trainer.default_hdfs_dir": None,
        "trainer.resume_mode": "auto",
        "trainer.resume_from_path": None,
    }


def log(spec: StageSpec) -> dict[str, Any]:
    return {
        "trainer.logger": ["console", "file"],
        "trainer.project_name": "opdctl",
        "trainer.experiment_name": spec.stage,
    }


# ------------------------------------------------------------------------------------------------------ optimizer


def optimizer(overrides: Overrides, train: Train, at: str, *, megatron: bool, updates: int = 1) -> None:
    """AdamW. verl counts a schedule in its own steps, each of `updates` optimizer steps.

    On FSDP the plug-in (`plugin.schedule`) takes the place of verl's schedules, which are constant and cosine only.
    """
    own = train.optimizer
    steps, warmup = train.max_steps // updates, math.ceil(own.warmup_steps / updates)
    overrides.own(
        "config.train.optimizer",
        {
            f"{at}.lr": own.lr,
            f"{at}.betas": list(own.betas),
            f"{at}.weight_decay": own.weight_decay,
            f"{at}.clip_grad": own.max_grad_norm,
            f"{at}.lr_warmup_steps": warmup,
            f"{at}.lr_warmup_steps_ratio": 0.0,
        }
        | (_megatron_schedule(own, at, steps) if megatron else _torch_schedule(own, at)),
    )
    overrides.own("config.train.max_steps", {f"{at}.total_training_steps": steps})


def _torch_schedule(own: Optimizer, at: str) -> dict[str, Any]:
    return {
        f"{at}.optimizer": "AdamW",
        f"{at}.optimizer_impl": "torch.optim",
        f"+{at}.override_optimizer_config.eps": own.eps,
        f"{at}.lr_scheduler_type": "cosine" if own.schedule == "cosine" else "constant",  # not read, see `optimizer`
        f"{at}.min_lr_ratio": own.min_lr_ratio,
        f"{at}.num_cycles": 0.5,
        f"{at}.zero_indexed_step": True,
        f"{at}.warmup_style": None,
    }


def _megatron_schedule(own: Optimizer, at: str, steps: int) -> dict[str, Any]:
    # verl hands no betas on to Megatron (verl/utils/megatron/optimizer.py): they go with eps
    adam = {"adam_beta1": own.betas[0], "adam_beta2": own.betas[1], "adam_eps": own.eps}
    wsd = own.schedule == "wsd"
    return {
        f"{at}.optimizer": "adam",
        **{f"+{at}.override_optimizer_config.{name}": value for name, value in adam.items()},
        f"{at}.lr_decay_style": "WSD" if wsd else own.schedule,
        f"{at}.lr_decay_steps": steps,
        f"{at}.min_lr": own.lr * own.min_lr_ratio,
        f"{at}.lr_warmup_init": 0.0,
        f"{at}.lr_wsd_decay_style": "linear",
        f"{at}.lr_wsd_decay_steps": max(1, round(own.decay_fraction * steps)) if wsd else None,
        f"{at}.weight_decay_incr_style": "constant",
        f"{at}.use_checkpoint_opt_param_scheduler": False,
        f"{at}.use_precision_aware_optimizer": False,
    }


# -------------------------------------------------------------------------------------------------------- sharding


def fsdp(spec: StageSpec, resources: Resources, precision: str, at: str) -> dict[str, dict[str, Any]]:
    """opdctl's key -> verl's keys of an FSDP2 engine: weights and optimizer in float32, computing in `precision`."""
    verl, cpu, short = resources.verl, on_cpu(spec), _SHORT[precision]
    return {
        "resources.verl.strategy": {f"{at}.strategy": "fsdp2", f"{at}.fsdp_size": -1},
        "resources.verl.offload": {
            f"{at}.param_offload": verl.offload,
            f"{at}.optimizer_offload": verl.offload,
            f"{at}.offload_policy": False,
        },
        "resources.verl.sequence_parallel": {f"{at}.ulysses_sequence_parallel_size": verl.sequence_parallel},
        "config.train.precision": {
            f"{at}.model_dtype": "fp32",
            f"{at}.dtype": precision,
            f"+{at}.mixed_precision": {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        },
        "seed": {f"{at}.seed": verl_seed(spec)},
        "": {
            f"{at}.reshard_after_forward": True,
            f"{at}.forward_prefetch": False,
            f"{at}.use_orig_params": False,
            f"{at}.full_determinism": False,
            f"{at}.use_torch_compile": not cpu,
            f"{at}.use_no_sync_for_gradient_accumulation": False,
        },
    }


def megatron(spec: StageSpec, resources: Resources, precision: str, at: str) -> dict[str, dict[str, Any]]:
    """opdctl's key -> verl's keys of a Megatron engine; the bridge reads and writes Hugging Face weights."""
    verl = resources.verl
    return {
        "resources.verl.tensor_parallel": {
            f"{at}.tensor_model_parallel_size": verl.tensor_parallel,
            f"{at}.sequence_parallel": verl.tensor_parallel > 1,
        },
        "resources.verl.pipeline_parallel": {f"{at}.pipeline_model_parallel_size": verl.pipeline_parallel},
        "resources.verl.expert_parallel": {
            f"{at}.expert_model_parallel_size": verl.expert_parallel,
            f"{at}.expert_tensor_parallel_size": 1 if verl.expert_parallel > 1 else None,
        },
        "resources.verl.sequence_parallel": {f"{at}.context_parallel_size": verl.sequence_parallel},
        "resources.verl.offload": {f"{at}.param_offload": verl.offload, f"{at}.optimizer_offload": verl.offload},
        "config.train.precision": {f"{at}.dtype": precision},
        "seed": {f"{at}.seed": verl_seed(spec)},
        "": {
            f"{at}.virtual_pipeline_model_parallel_size": None,
            f"{at}.dynamic_context_parallel": False,
            f"{at}.use_distributed_optimizer": True,
            f"{at}.use_mbridge": True,
            f"{at}.vanilla_mbridge": False,
            f"{at}.use_dist_checkpointing": False,
            f"{at}.use_remove_padding": True,
            f"{at}.override_transformer_config.recompute_granularity": "full",
            f"{at}.override_transformer_config.recompute_method": "uniform",
            f"{at}.override_transformer_config.recompute_num_layers": 1,
        },
    }


def apply(overrides: Overrides, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Add keys grouped by the setting that decides them; those under "" are open to raw overrides."""
    for source, values in groups.items():
        if source:
            overrides.own(source, values)
        else:
            overrides.choose(values)

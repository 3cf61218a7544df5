"""The overrides of verl's SFT trainer."""

from opdctl.backends.contract import StageSpec
from opdctl.backends.verl import render_engine
from opdctl.backends.verl.layout import layout
from opdctl.backends.verl.overrides import Overrides
from opdctl.backends.verl.render_engine import verl_seed
from opdctl.settings import Resources, SftSettings


def sft(spec: StageSpec) -> Overrides:
    """Of a stage of kind sft."""
    settings, resources = SftSettings.model_validate(spec.config), Resources.model_validate(spec.resources)
    overrides = Overrides()
    megatron = resources.verl.strategy == "megatron"
    if megatron:
        overrides.own("resources.verl.strategy", {"engine": "megatron", "optim": "megatron"})
    init = next(given for given in spec.inputs if given.role == "init")
    render_engine.model(overrides, spec, "model", init)
    _data(overrides, spec, settings, resources)
    sharding = render_engine.megatron if megatron else render_engine.fsdp
    render_engine.apply(overrides, sharding(spec, resources, settings.train.precision, "engine"))
    render_engine.optimizer(overrides, settings.train, "optim", megatron=megatron)
    render_engine.checkpoint(overrides, "checkpoint")
    _trainer(overrides, spec, settings, resources)
    return overrides


def _data(overrides: Overrides, spec: StageSpec, settings: SftSettings, resources: Resources) -> None:
    overrides.own(
        "config.data",
        {
            "data.train_files": str(layout(spec).train),
            "data.val_files": None,
            "data.train_max_samples": -1,
            "data.messages_key": "messages",
            "data.pad_mode": "no_padding",
            "data.custom_cls.path": None,
        },
    )
    overrides.own("config.max_tokens", {"data.max_length": settings.max_tokens, "data.truncation": "error"})
    overrides.own("config.train.global_batch_size", {"data.train_batch_size": settings.train.global_batch_size})
    overrides.own(
        "resources.micro_batch_tokens",
        {
            "data.use_dynamic_bsz": True,
            "data.max_token_len_per_gpu": resources.micro_batch_tokens,
            "data.micro_batch_size_per_gpu": 1,
        },
    )
    overrides.own(
        "tasks.*.template",
        {
            # prompt and answer are tokenized apart, as by the embedded backend; verl would compare with both in one
            "data.ignore_input_ids_mismatch": True,
            # verl's YAML says `none`, which YAML reads as a string, and verl as true
            "data.enable_thinking_default": None,
        },
    )
    overrides.choose({"data.num_workers": 0, "data.use_shm": False, "data.balance_dp_token": False})


def _trainer(overrides: Overrides, spec: StageSpec, settings: SftSettings, resources: Resources) -> None:
    render_engine.trainer(overrides, spec, settings.train, resources)
    # opdctl deletes old saves: verl would do it before the new one is whole
    overrides.own("resources.verl.keep_last", {"trainer.max_ckpt_to_keep": None})
    overrides.own("seed", {"trainer.seed": verl_seed(spec)})
    overrides.own(
        "opdctl finds saves and logs in the stage's folder",
        render_engine.saves(spec),
    )
    overrides.own(
        "opdctl reads verl's log, and is the only writer to MLflow",
        render_engine.log(spec) | {"trainer.test_freq": -1},
    )
    overrides.choose({"trainer.balance_batch": True, "trainer.profile_interval": [-1, -1]})

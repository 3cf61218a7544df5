"""What a backend cannot do, as sentences that say which one can: asked for every stage before launch.

What is said of verl was read in its version 0.9.1, at the file that each comment names.
"""

from collections.abc import Iterator, Mapping, Sequence

from opdctl.references import Input, Problem
from opdctl.settings import (
    AnyStage,
    AnyTask,
    ClippedSurrogate,
    EvalSettings,
    EvalStage,
    FileTask,
    ForwardKlOpd,
    FullVocabOpd,
    Grader,
    HarnessSettings,
    JsdOpd,
    MergeStage,
    MiniLlmOpd,
    Mismatch,
    NewModel,
    OpdSettings,
    Opsm,
    OverlapOpd,
    PipelineSettings,
    PolicyGradientOpd,
    RlvrSettings,
    Rollout,
    SampleStage,
    SelectSettings,
    SelectStage,
    SequenceMask,
    SftSettings,
    SftStage,
    Tis,
    TopKOpd,
)
from opdctl.settings.merge import MergeSettings
from opdctl.workers import VerlResources, VerlWorkers

Trained = SftSettings | RlvrSettings | OpdSettings


def missing(settings: AnyStage, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    """Key and sentence of everything that the stage asks of its backend in vain."""
    if settings.verl and settings.backend != "verl":
        yield "verl", f"raw overrides are for backend: verl, and this stage has backend: {settings.backend}"
    config = settings.config
    if isinstance(config, HarnessSettings):
        if settings.backend != "embedded":
            yield "backend", f"{settings.backend}, and lm-eval loads models itself: harness: lm_eval needs embedded"
        return
    match settings.backend:
        case "verl":
            yield from _verl(settings, inputs, pipeline)
        case "vllm" if isinstance(settings, MergeStage | SelectStage):
            yield "backend", f"vllm generates only: kind {settings.kind} needs backend: embedded"
        case "vllm" if not isinstance(settings, EvalStage | SampleStage):
            yield "backend", f"vllm generates only: kind {settings.kind} needs backend: embedded or verl"
    if not isinstance(config, MergeSettings | SelectSettings):
        if settings.backend != "embedded":
            yield from _long_rollouts(settings.backend, getattr(config, "rollout", None))
        yield from _images(settings, {name: pipeline.tasks.get(name) for name in config.data.tasks})
    if isinstance(config, EvalSettings) and settings.backend == "vllm" and config.grader is not None:
        yield from _grader(config.grader)
    if isinstance(config, EvalSettings) and config.divergence:
        yield from _divergence(settings, inputs)


def _divergence(settings: AnyStage, inputs: Sequence[Input]) -> Iterator[Problem]:
    if settings.backend == "vllm":
        yield "config.divergence", "vLLM does not give the whole distribution: needs backend: embedded"
    for role in ("before", "teachers", "after"):
        if not any(given.role == role for given in inputs):
            yield "config.divergence", f"compares students with their teachers: needs the input role {role} too"


def _long_rollouts(backend: str, rollout: Rollout | None) -> Iterator[Problem]:
    if rollout is not None and rollout.journal is not None:
        text = f"{backend} keeps unfinished completions in memory, and a killed phase starts them anew: "
        yield "config.rollout.journal", text + "backend: embedded has a journal"
    if rollout is not None and rollout.partial is not None:
        # PPOTrainerColocateAsync in trainer/ppo/v1: what is unfinished once a batch of prompts is whole is aborted, and
        # asked for again after the update
        own = ", and resources.verl.mode: async has verl's own, which waits for whole prompts instead of a fraction"
        text = f"{backend} pauses no completions at a fraction of a batch: backend: embedded does"
        yield "config.rollout.partial", text + (own if backend == "verl" else "")


def _grader(grader: Grader) -> Iterator[Problem]:
    if grader.by != "endpoint":
        why = "vLLM is loaded for the models and the lengths that are evaluated"
        yield "config.grader.by", f"{grader.by}: {why}: take by: endpoint, or backend: embedded"


def _images(settings: AnyStage, tasks: Mapping[str, AnyTask | None]) -> Iterator[Problem]:
    """Where one task has images, verl renders all prompts of the stage by the model's own template."""
    files = {name: task for name, task in tasks.items() if isinstance(task, FileTask)}
    shown = [name for name, task in files.items() if task.images]
    for name in shown:
        if settings.backend != "verl" or isinstance(settings, SftStage):
            where = "kind sft" if settings.backend == "verl" else f"backend: {settings.backend}"
            text = f"'{name}' has images, which {where} does not read: kinds rlvr and opd with backend: verl do"
            yield "config.data.tasks", text
    for name in tasks if shown else ():
        if name not in files or files[name].template == "raw":
            text = f"'{shown[0]}' has images, and verl then renders all prompts by the chat template: '{name}' has none"
            yield "config.data.tasks", text


def _verl(settings: AnyStage, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    if isinstance(settings, MergeStage | SelectStage):
        yield "backend", f"verl trains only: kind {settings.kind} needs backend: embedded"
        return
    if isinstance(settings, EvalStage | SampleStage):
        yield "backend", f"verl trains only: kind {settings.kind} needs backend: vllm or embedded"
        return
    config, resources = settings.config, settings.resources.verl
    yield from _precision(config, resources)
    if config.train.lora is not None:
        text = "a checkpoint holds merged weights, and verl saves adapters apart: backend: embedded merges"
        yield "config.train.lora", text
    yield from _parallel(config, resources)
    yield from _machine(config, resources, pipeline.workers.verl)
    yield from _lengths(config, resources, settings.resources.micro_batch_tokens, pipeline)
    if isinstance(config, RlvrSettings):
        yield from _rlvr(config, inputs)
    if isinstance(config, OpdSettings):
        yield from _opd(config, resources)
        if settings.resources.teacher_states == "cached":
            yield (
                "resources.teacher_states",
                "cached, and verl serves whole teachers from GPUs of their own: backend: embedded caches",
            )


def _precision(config: Trained, resources: VerlResources) -> Iterator[Problem]:
    # McoreEngineConfig in workers/config/engine.py
    if resources.strategy == "megatron" and config.train.precision == "float32":
        yield (
            "config.train.precision",
            "float32, and Megatron trains in bfloat16; strategy: fsdp2 and backend: embedded train in float32",
        )


# ----------------------------------------------------------------------------------------------------- parallelism


def data_parallel(resources: VerlResources) -> int:
    """Groups of GPUs that read batches of their own; not a whole number where the rest of the GPUs is left over."""
    return resources.nodes * resources.gpus_per_node // _model_parallel(resources)


def _model_parallel(resources: VerlResources) -> int:
    if resources.strategy == "fsdp2":
        return resources.sequence_parallel
    return resources.sequence_parallel * resources.tensor_parallel * resources.pipeline_parallel


def _parallel(config: Trained, resources: VerlResources) -> Iterator[Problem]:
    world, group = resources.nodes * resources.gpus_per_node, _model_parallel(resources)
    if resources.strategy == "fsdp2":
        for key in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            if getattr(resources, key) > 1:
                yield f"resources.verl.{key}", "strategy: fsdp2 does not split models so; strategy: megatron does"
    if world % group:
        yield (
            "resources.verl.sequence_parallel" if resources.strategy == "fsdp2" else "resources.verl.tensor_parallel",
            f"a model takes {group} GPUs (sequence_parallel x tensor_parallel x pipeline_parallel), which does not "
            f"divide the {world} of the trainer (nodes x gpus_per_node)",
        )
    elif (world // resources.pipeline_parallel) % resources.expert_parallel:
        yield (
            "resources.verl.expert_parallel",
            f"{resources.expert_parallel} does not divide the {world // resources.pipeline_parallel} GPUs of one stage "
            "of the model's pipeline",
        )
    elif config.train.global_batch_size % data_parallel(resources):
        # TrainingWorker.train_mini_batch in workers/engine_workers.py
        yield (
            "config.train.global_batch_size",
            f"{config.train.global_batch_size}, and {data_parallel(resources)} data-parallel groups of GPUs cannot "
            f"share it evenly (resources.verl: {world} GPUs, {group} a model)",
        )
    if not isinstance(config, SftSettings) and world % resources.rollout_tensor_parallel:
        yield (
            "resources.verl.rollout_tensor_parallel",
            f"{resources.rollout_tensor_parallel} does not divide the {world} GPUs of the trainer, which the rollouts "
            "share",
        )


def _machine(config: Trained, resources: VerlResources, workers: VerlWorkers) -> Iterator[Problem]:
    if isinstance(config, SftSettings) and resources.nodes > 1:
        yield "resources.verl.nodes", f"{resources.nodes}, and SFT runs on one node: opdctl starts it by torchrun"
    elif resources.nodes > 1 and workers.ray_address is None:
        yield (
            "resources.verl.nodes",
            f"{resources.nodes}, and a stage's own Ray has one: start Ray on all nodes, set workers.verl.ray_address",
        )
    if workers.device == "cpu":
        if resources.strategy == "megatron":
            yield "resources.verl.strategy", "megatron needs GPUs, and workers.verl.device is cpu: use fsdp2"
        if resources.sequence_parallel > 1:
            yield "resources.verl.sequence_parallel", "needs flash attention, and workers.verl.device is cpu: use 1"


# --------------------------------------------------------------------------------------------------------- lengths


def _lengths(
    config: Trained, resources: VerlResources, micro_batch_tokens: int, pipeline: PipelineSettings
) -> Iterator[Problem]:
    """A sequence is never split over micro-batches, and no engine reads beyond a model's positions."""
    if isinstance(config, SftSettings):
        longest, what = config.max_tokens, "config.max_tokens"
    else:
        longest = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
        what = "max_prompt_tokens + max_completion_tokens"
        # vllm/config/scheduler.py
        if resources.max_num_seqs > resources.max_batched_tokens:
            yield (
                "resources.verl.max_num_seqs",
                f"{resources.max_num_seqs} sequences cannot decode at once with resources.verl.max_batched_tokens "
                f"{resources.max_batched_tokens}: vLLM refuses it",
            )
        # one token more for a teacher; workers/config/distillation.py and vllm_async_server.py
        positions = pipeline.model.shape.max_position_embeddings if isinstance(pipeline.model, NewModel) else None
        if positions is not None and longest + 1 > positions:
            yield (
                "config.rollout.max_completion_tokens",
                f"{what} is {longest} and a served model needs one position more, but model.shape."
                f"max_position_embeddings is {positions}",
            )
    # utils/seqlen_balancing.py
    if longest > micro_batch_tokens * resources.sequence_parallel:
        yield (
            "resources.micro_batch_tokens",
            f"{micro_batch_tokens} x sequence_parallel {resources.sequence_parallel} does not hold the longest "
            f"sequence ({what} = {longest}), which verl never splits",
        )


# ----------------------------------------------------------------------------------------------------------- kinds


def _groups(config: RlvrSettings | OpdSettings) -> Iterator[Problem]:
    size, batch = config.rollout.group_size, config.train.global_batch_size
    # actor.ppo_mini_batch_size; PPOTrainer._update_actor in trainer/ppo/v1/trainer_base.py
    if batch % size:
        yield (
            "config.train.global_batch_size",
            f"{batch} is no multiple of rollout.group_size {size}: verl counts its mini-batches in prompts; backend: "
            "embedded counts sequences",
        )


def _rlvr(config: RlvrSettings, inputs: Sequence[Input]) -> Iterator[Problem]:
    yield from _groups(config)
    yield from _mismatch(config.mismatch, "config.mismatch")
    # compute_policy_loss_gspo in trainer/ppo/core_algos.py
    if (
        isinstance(config.surrogate, ClippedSurrogate)
        and config.surrogate.level == "sequence"
        and config.surrogate.dual
    ):
        yield "config.surrogate.dual", "verl's GSPO has no such bound: backend: embedded has it"
    if config.grader is not None:
        yield "config.grader", "verl's rewards come from the tasks' verifiers only: backend: embedded asks a grader"
    # ReplayBuffer in trainer/ppo/v1/replay_buffer.py replaces such groups until the batch is full, however long
    if config.dynamic_sampling is not None:
        yield (
            "config.dynamic_sampling",
            "verl knows no limit of rounds (it ignores filter_groups.max_num_gen_batches): backend: embedded has it",
        )
    if config.overlong.handling == "mask":
        yield (
            "config.overlong.handling",
            "mask: verl cannot leave a completion out of the loss; backend: embedded can, or take soft_penalty",
        )
    # ActorRolloutRefWorker.init_model in workers/engine_workers.py makes both from one path
    by_role = {given.role: given for given in inputs}
    if config.kl.estimator != "none" and {"init", "reference"} <= by_role.keys():
        init, reference = by_role["init"], by_role["reference"]
        if init.ref != reference.ref:
            yield (
                "inputs.reference",
                f"{reference.ref}, and verl's reference is the model that training starts from, {init.ref}; backend: "
                "embedded takes any",
            )


def _embedded_only(config: OpdSettings) -> Iterator[Problem]:
    """What the embedded engine adds to verl's loop of sampling, scoring and learning."""
    loss = config.loss
    wanted = {"sampled_by": config.sampled_by == "teacher", "balance": config.balance}
    wanted["extrapolation"] = config.extrapolation is not None
    if isinstance(loss, PolicyGradientOpd):
        wanted["loss.teacher_scale"] = loss.teacher_scale != 1
        wanted |= {"loss.discount": loss.discount > 0, "loss.margin": loss.margin is not None}
    for key, used in wanted.items():
        if used:
            yield f"config.{key}", "verl's distillation has no place for it: backend: embedded has"


def _mismatch(given: Mismatch | None, key: str) -> Iterator[Problem]:
    # rollout_corr_helper.py; its rejected sequences leave the divisors of the means as well
    if isinstance(given, Opsm | SequenceMask):
        yield f"{key}.rule", f"{given.rule}: verl has no such rule: backend: embedded has it; verl has tis and icepop"
    if isinstance(given, Tis) and given.floor > 0:
        yield f"{key}.floor", f"{given.floor}: verl caps ratios from above only: backend: embedded has it, or take 0"


def _opd(config: OpdSettings, resources: VerlResources) -> Iterator[Problem]:
    yield from _groups(config)
    loss = config.loss
    if isinstance(loss, FullVocabOpd | ForwardKlOpd | JsdOpd | MiniLlmOpd):
        yield (
            "config.loss.form",
            f"{loss.form} needs all of a teacher's logits, and verl's served teachers give their top k: "
            "backend: embedded computes it, or take form: topk",
        )
    if isinstance(loss, TopKOpd | OverlapOpd) and resources.strategy == "megatron":
        yield (
            "resources.verl.strategy",
            f"megatron splits the vocabulary over GPUs, and form: {loss.form} needs whole rows of logits: take fsdp2",
        )
    if isinstance(loss, PolicyGradientOpd):
        yield from _mismatch(loss.mismatch, "config.loss.mismatch")
    yield from _embedded_only(config)
    # the engines divide all logits of a stage by it; the teacher's stay at 1 (experimental/teacher_loop)
    if config.rollout.temperature != 1.0:
        yield (
            "config.rollout.temperature",
            f"{config.rollout.temperature}, and verl would compare the student at this temperature with the teacher at "
            "1; backend: embedded samples at one temperature and compares at 1",
        )

"""What can be known before launch about a stage whose keys are all valid: do its numbers, names and inputs agree?"""

from collections.abc import Iterator, Sequence

from opdctl import capabilities
from opdctl.checks_inputs import STATIC_COLUMNS, check_coverage, check_labels, check_roles, check_route_columns, mixture
from opdctl.checks_losses import check_losses
from opdctl.references import Input, Problem, near_miss
from opdctl.settings import (
    AnyStage,
    ChainTask,
    EnvironmentTaskSettings,
    EvalSettings,
    EvalStage,
    FuseTask,
    Grader,
    GradeTask,
    Mixture,
    NewModel,
    OpdSettings,
    OpdStage,
    OverlapOpd,
    PipelineSettings,
    RlvrSettings,
    RlvrStage,
    Rollout,
    SampleSettings,
    SampleStage,
    SftSettings,
    SftStage,
    TopKOpd,
    Train,
)
from opdctl.settings.merge import ConvexMerge, MergeSettings, SceMerge

CONVEX_TOLERANCE = 1e-6  # a third is 0.333333 to most writers


def check_stage(settings: AnyStage, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    """Every contradiction, as key and text."""
    config = settings.config
    yield from _data(settings, pipeline)
    yield from _episodes(settings, pipeline)
    yield from _resources(settings, inputs, pipeline)
    yield from check_roles(settings, inputs)
    yield from check_labels(inputs)
    yield from capabilities.missing(settings, inputs, pipeline)
    if isinstance(config, RlvrSettings):
        yield from _rlvr(config, pipeline)
    if isinstance(settings, OpdStage):
        yield from _opd(settings.config, inputs, pipeline)
        yield from check_route_columns(settings, pipeline)
    if isinstance(config, RlvrSettings | OpdSettings):
        yield from check_losses(config)
    if isinstance(config, EvalSettings):
        yield from _eval(config, inputs, pipeline)
    if isinstance(config, EvalSettings | SampleSettings) and config.rollout.partial is not None:
        text = f"would not be read: kind {settings.kind} has one model and no later weights; rlvr and opd have"
        yield "config.rollout.partial", text
    if isinstance(config, RlvrSettings | EvalSettings) and config.grader is not None:
        yield from _grader(config.grader, config)
    if isinstance(config, SftSettings | RlvrSettings | OpdSettings) and config.train.lora is not None:
        yield from _lora(config, inputs)
    if isinstance(config, MergeSettings):
        yield from _merge(config, inputs)
    if isinstance(config, SampleSettings) and config.per_prompt > config.rollout.group_size:
        yield (
            "config.per_prompt",
            f"{config.per_prompt} answers of a prompt need as many tries: rollout.group_size is "
            f"{config.rollout.group_size}",
        )


def _data(settings: AnyStage, pipeline: PipelineSettings) -> Iterator[Problem]:
    data = mixture(settings)
    if data is None:
        return
    for name in dict.fromkeys(data.tasks):
        if name not in pipeline.tasks:
            yield "config.data.tasks", f"no task is called '{name}'" + near_miss(name, pipeline.tasks, "tasks")
    yield from _ratios(settings, data)
    for effort in dict.fromkeys(data.efforts):
        yield from _effort("config.data.efforts", effort, pipeline)
        for name in dict.fromkeys(data.tasks):
            task = pipeline.tasks.get(name)
            key = f"tasks.{name}"
            if isinstance(task, GradeTask | FuseTask):
                key, task = f"{key}.chain", task.chain
            if isinstance(task, ChainTask) and effort not in task.strides:
                yield "config.data.efforts", f"{key}.strides has none for effort '{effort}'"
            elif isinstance(task, ChainTask) and task.links % task.strides[effort]:
                text = f"{key}.strides.{effort}: {task.strides[effort]} does not divide links = {task.links}"
                yield "config.data.efforts", text


def _episodes(settings: AnyStage, pipeline: PipelineSettings) -> Iterator[Problem]:
    data, config = mixture(settings), settings.config
    played = [name for name in (data.tasks if data else ()) if _has_environment(name, pipeline)]
    if not played:
        return
    if isinstance(config, SampleSettings):
        why = "a sampled answer is one text, which would have SFT imitate what the environment wrote"
        yield "config.data.tasks", f"'{played[0]}' is played in turns, and kind sample keeps none: {why}"
        return
    if isinstance(config, RlvrSettings | EvalSettings) and config.grader is not None:
        for name in dict.fromkeys(name for name in config.grader.tasks if name in played):
            yield (
                "config.grader.tasks",
                f"'{name}' is played in turns: its environment judges it, no text of it could be",
            )
    if not isinstance(config, RlvrSettings | OpdSettings | EvalSettings):
        return
    turns, limit = config.rollout.turns, config.rollout.max_completion_tokens
    if turns is None:
        yield "config.rollout.turns", f"required, and not set: '{played[0]}' is played in turns"
    elif turns.max_turn_tokens > limit:
        yield (
            "config.rollout.turns.max_turn_tokens",
            f"{turns.max_turn_tokens}, and rollout.max_completion_tokens {limit} leaves no room for one turn",
        )


def _has_environment(name: str, pipeline: PipelineSettings) -> bool:
    return isinstance(pipeline.tasks.get(name), EnvironmentTaskSettings)


def _ratios(settings: AnyStage, data: Mixture) -> Iterator[Problem]:
    if data.ratios and isinstance(settings, EvalStage | SampleStage):
        yield "config.data.ratios", f"would not be read: kind {settings.kind} asks every task rollout.prompts prompts"
    if data.distinct is not None and not isinstance(settings, RlvrStage | OpdStage):
        yield "config.data.distinct", f"would not be read: kinds rlvr and opd draw prompts, and this is {settings.kind}"
    for name in data.ratios:
        if name not in data.tasks:
            hint = near_miss(name, data.tasks, "config.data.tasks")
            yield f"config.data.ratios.{name}", f"the stage reads no task '{name}'" + hint


def _effort(key: str, effort: str, pipeline: PipelineSettings) -> Iterator[Problem]:
    levels = pipeline.efforts.levels if pipeline.efforts else {}
    if effort not in levels:
        yield key, f"no effort level is called '{effort}'" + near_miss(effort, levels, "efforts.levels")


def _resources(settings: AnyStage, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    if settings.resources.gradient_checkpointing and not isinstance(settings, SftStage | RlvrStage | OpdStage):
        text = f"would not be read: kind {settings.kind} has no backward pass"
        yield "resources.gradient_checkpointing", text
    gpus = computed_gpus(settings, inputs, pipeline)
    own = settings.resources.gpus
    if own not in (0, gpus):
        yield "resources.gpus", f"{own}, but resources.{settings.backend} takes {gpus}: leave the key out"
    wanted = {"slots": settings.resources.slots, "cpus": settings.resources.cpus, "gpus": gpus}
    for what, number in wanted.items():
        there = getattr(pipeline.machine, what)
        if number > there:
            yield f"resources.{what}", f"{number}, but machine.{what} is {there}{_teacher_gpus(settings, inputs, what)}"


def _teacher_gpus(settings: AnyStage, inputs: Sequence[Input], what: str) -> str:
    verl, teachers = settings.resources.verl, sum(given.role == "teachers" for given in inputs)
    if what != "gpus" or settings.backend != "verl" or not teachers:
        return ""
    return (
        f" (trainer {verl.nodes} x {verl.gpus_per_node}, and {teachers} teachers x {verl.teacher_replicas} replicas x "
        f"{verl.teacher_tensor_parallel}: verl serves every teacher on GPUs of its own)"
    )


def computed_gpus(settings: AnyStage, inputs: Sequence[Input], pipeline: PipelineSettings) -> int:
    """GPUs that a stage takes: of a verl stage the trainer's and, for OPD, those of every teacher's servers."""
    if settings.backend == "embedded":
        return settings.resources.gpus
    if getattr(pipeline.workers, settings.backend).device == "cpu":
        return 0
    if settings.backend == "vllm":
        return settings.resources.vllm.tensor_parallel
    verl = settings.resources.verl
    teachers = sum(given.role == "teachers" for given in inputs)
    return verl.nodes * verl.gpus_per_node + teachers * verl.teacher_replicas * verl.teacher_tensor_parallel


# ---------------------------------------------------------------------------------------------- kinds


def _rlvr(config: RlvrSettings, pipeline: PipelineSettings) -> Iterator[Problem]:
    yield from _batches(config.rollout, config.train)
    if config.rollout.group_size < 2:
        yield "config.rollout.group_size", "1, but an advantage compares the completions of a group: give 2 or more"
    if config.effort is not None:
        yield from _effort("config.effort.budget.effort", config.effort.budget.effort, pipeline)


def _grader(grader: Grader, config: RlvrSettings | EvalSettings) -> Iterator[Problem]:
    for name in dict.fromkeys(grader.tasks):
        if name not in config.data.tasks:
            hint = near_miss(name, config.data.tasks, "config.data.tasks")
            yield "config.grader.tasks", f"the stage reads no task '{name}'" + hint
    if grader.mode == "pairwise" and isinstance(config, EvalSettings) and config.rollout.group_size < 2:
        yield "config.grader.mode", "pairwise compares the completions of a group: give rollout.group_size 2 or more"


def _lora(config: SftSettings | RlvrSettings | OpdSettings, inputs: Sequence[Input]) -> Iterator[Problem]:
    for given in inputs:
        if given.role in ("init", "student") and given.kind == "model":
            text = "adapters change a trained model a little, and this stage begins with a new one: leave lora out"
            yield "config.train.lora", text
    if isinstance(config, OpdSettings) and config.extrapolation is not None:
        text = "stretches weights, and with lora these are products of what is trained: leave one of both out"
        yield "config.extrapolation", text


def _merge(config: MergeSettings, inputs: Sequence[Input]) -> Iterator[Problem]:
    weights = [given.weight for given in inputs if given.role == "models"]
    if isinstance(config.merge, ConvexMerge) and abs(sum(weights) - 1) > CONVEX_TOLERANCE:
        listed = " + ".join(f"{weight:g}" for weight in weights)
        yield "inputs.models", f"method convex needs weights that sum to 1, and {listed} is {sum(weights):g}"
    if isinstance(config.merge, SceMerge):
        if len(weights) < 2:
            yield "inputs.models", "method sce compares models: give 2 or more"
        if any(weight != 1 for weight in weights):
            yield "inputs.models", "method sce weighs the models itself: leave their weights out"


def _batches(rollout: Rollout, train: Train) -> Iterator[Problem]:
    """A rollout batch is used up by a whole number of optimizer steps; recovery state is saved between batches."""
    sequences, batch = rollout.prompts * rollout.group_size, train.global_batch_size
    if sequences % batch:
        yield (
            "config.train.global_batch_size",
            f"{batch} does not divide the {sequences} sequences of a rollout batch "
            f"(rollout.prompts {rollout.prompts} x rollout.group_size {rollout.group_size})",
        )
        return
    updates = sequences // batch
    for key, steps in (("max_steps", train.max_steps), ("save_every", train.save_every)):
        if steps % updates:
            yield (
                f"config.train.{key}",
                f"{steps} is no multiple of the {updates} optimizer steps per rollout batch "
                f"(rollout.prompts x rollout.group_size / global_batch_size)",
            )


def _opd(config: OpdSettings, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    yield from _batches(config.rollout, config.train)
    teachers = [given for given in inputs if given.role == "teachers"]
    if config.default_teacher is not None and config.default_teacher not in [given.label for given in teachers]:
        labels = [given.label for given in teachers]
        yield (
            "config.default_teacher",
            f"no teacher is called '{config.default_teacher}'" + near_miss(config.default_teacher, labels, "teachers"),
        )
    if isinstance(config.loss, TopKOpd | OverlapOpd) and isinstance(pipeline.model, NewModel):
        vocabulary = len(pipeline.model.tokenizer.words)
        if config.loss.k > vocabulary:
            yield "config.loss.k", f"{config.loss.k}, but the vocabulary has {vocabulary} words"
    if "effort" in config.route_by and not config.data.efforts:
        yield "config.route_by", "rows have no effort to route by: config.data.efforts is empty"
    elif teachers:
        yield from check_coverage(config, config.route_by, teachers, config.default_teacher is not None)


def _eval(config: EvalSettings, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    for k in config.pass_k:
        if k > config.rollout.group_size:
            yield "config.pass_k", f"{k} needs as many samples per prompt: rollout.group_size is smaller"
    if config.within is not None:
        yield from _effort("config.within.budget.effort", config.within.budget.effort, pipeline)
        if not config.data.efforts:
            yield "config.within", "budgets belong to effort levels, and config.data.efforts is empty"
        for effort in dict.fromkeys(config.data.efforts):
            if effort not in config.within.tau:
                yield f"config.within.tau.{effort}", "required, and not set: config.data.efforts asks for this effort"
        for effort in config.within.tau:
            yield from _effort(f"config.within.tau.{effort}", effort, pipeline)
    if teachers := [given for given in inputs if given.role == "teachers"]:
        common = [column for column in STATIC_COLUMNS if all(column in given.route for given in teachers)]
        known = [column for column in common if column == "domain" or config.data.efforts]
        yield from check_coverage(config, known, teachers, False)


def used_efforts(settings: AnyStage) -> list[str]:
    """Effort levels that the stage's result depends on."""
    config, data = settings.config, mixture(settings)
    used = list(data.efforts) if data else []
    if isinstance(config, RlvrSettings) and config.effort:
        used.append(config.effort.budget.effort)
    if isinstance(config, EvalSettings) and config.within:
        used.append(config.within.budget.effort)
    return used

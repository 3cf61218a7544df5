"""What can be known before launch about a stage whose keys are all valid: do its numbers, names and inputs agree?"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from opdctl import capabilities
from opdctl.references import Input, Problem, near_miss
from opdctl.settings import (
    AnyStage,
    Budget,
    ChainTask,
    EvalSettings,
    EvalStage,
    Mixture,
    NewModel,
    OpdSettings,
    OpdStage,
    PipelineSettings,
    RlvrSettings,
    Rollout,
    SampleSettings,
    SampleStage,
    SelectSettings,
    SftSettings,
    TopKOpd,
    Train,
)
from opdctl.settings.merge import WITHOUT_BASE, ConvexMerge, MergeSettings, SceMerge

CONVEX_TOLERANCE = 1e-6  # a third is 0.333333 to most writers
STATIC_COLUMNS = ("domain", "effort")  # of every row; known before any row is read


def mixture(settings: AnyStage) -> Mixture | None:
    """What the stage reads of the tasks; None for a merge and a selection."""
    return None if isinstance(settings.config, MergeSettings | SelectSettings) else settings.config.data


def route_columns(settings: AnyStage, pipeline: PipelineSettings) -> list[str]:
    """The columns of a row that labels of this stage's models are compared with."""
    if isinstance(settings, OpdStage):
        return list(settings.config.route_by)
    if isinstance(settings, EvalStage):
        return [*STATIC_COLUMNS, *_file_columns(settings, pipeline)]
    return []


def check_stage(settings: AnyStage, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    """Every contradiction, as key and text."""
    config = settings.config
    yield from _data(settings, pipeline)
    yield from _resources(settings, inputs, pipeline)
    yield from _roles(settings, inputs)
    yield from _labels(inputs)
    yield from capabilities.missing(settings, inputs, pipeline)
    if isinstance(config, RlvrSettings):
        yield from _rlvr(config, pipeline)
    if isinstance(config, OpdSettings):
        yield from _opd(config, inputs, pipeline)
        yield from _file_column_names(settings, pipeline)
    if isinstance(config, EvalSettings):
        yield from _eval(config, inputs, pipeline)
    if isinstance(config, MergeSettings):
        yield from _merge(config, inputs)
    if isinstance(config, SampleSettings) and config.per_prompt > config.rollout.group_size:
        yield (
            "config.per_prompt",
            f"{config.per_prompt} answers of a prompt need as many tries: rollout.group_size is "
            f"{config.rollout.group_size}",
        )


def check_sources(settings: AnyStage, inputs: Sequence[Input], stages: Mapping[str, AnyStage]) -> Iterator[Problem]:
    """Do the stages that it reads publish what the role wants, a model or data? `stages`: those that are valid."""
    sampled: list[Mixture] = []
    for given in inputs:
        source = stages.get(given.target) if given.kind == "stage" else None
        if given.role == "data" and given.kind != "stage":
            yield "inputs.data", f"'{given.ref}' is no stage: rows of files are tasks, to be named in config.data.tasks"
        elif given.role == "data" and isinstance(source, SampleStage):
            sampled.append(source.config.data)
        elif given.role == "data" and source is not None:
            yield "inputs.data", f"'{given.target}' is of kind {source.kind}; kind sample publishes data"
        elif source is not None and source.kind in ("eval", "sample"):
            yield f"inputs.{given.role}", f"'{given.target}' is of kind {source.kind}, which publishes no model"
    if sampled and isinstance(settings.config, SftSettings):
        yield from _sampled(settings.config.data, sampled)


def _sampled(wanted: Mixture, given: Sequence[Mixture]) -> Iterator[Problem]:
    """Every task, at every effort, has to be sampled by some stage."""
    there = {(task, effort) for data in given for task in data.tasks for effort in data.efforts or [""]}
    for task in dict.fromkeys(wanted.tasks):
        efforts = [effort for own, effort in there if own == task]
        if not efforts:
            yield "inputs.data", f"no stage samples task '{task}' of config.data.tasks"
        elif bare := [effort for effort in dict.fromkeys(wanted.efforts) if effort not in efforts]:
            yield "inputs.data", f"no stage samples task '{task}' at effort {', '.join(bare)} of config.data.efforts"


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
            if isinstance(task, ChainTask) and effort not in task.strides:
                yield "config.data.efforts", f"tasks.{name}.strides has none for effort '{effort}'"
            elif isinstance(task, ChainTask) and task.links % task.strides[effort]:
                text = f"tasks.{name}.strides.{effort}: {task.strides[effort]} does not divide links = {task.links}"
                yield "config.data.efforts", text


def _ratios(settings: AnyStage, data: Mixture) -> Iterator[Problem]:
    if data.ratios and isinstance(settings, EvalStage | SampleStage):
        yield "config.data.ratios", f"would not be read: kind {settings.kind} asks every task rollout.prompts prompts"
    for name in data.ratios:
        if name not in data.tasks:
            hint = near_miss(name, data.tasks, "config.data.tasks")
            yield f"config.data.ratios.{name}", f"the stage reads no task '{name}'" + hint


def _effort(key: str, effort: str, pipeline: PipelineSettings) -> Iterator[Problem]:
    levels = pipeline.efforts.levels if pipeline.efforts else {}
    if effort not in levels:
        yield key, f"no effort level is called '{effort}'" + near_miss(effort, levels, "efforts.levels")


def _resources(settings: AnyStage, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
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


# ---------------------------------------------------------------------------------------------- inputs


def _roles(settings: AnyStage, inputs: Sequence[Input]) -> Iterator[Problem]:
    roles = {given.role for given in inputs} | settings.inputs.keys()  # a bad reference is told elsewhere
    config = settings.config
    required: dict[str, str] = {}
    useless: dict[str, str] = {}
    match config:
        case RlvrSettings():
            required["init"] = ""
            kl, effort = config.kl.estimator != "none", config.effort is not None
            (required if kl else useless)["reference"] = f"config.kl.estimator is {config.kl.estimator}"
            (required if effort else useless)["budget"] = f"config.effort is {'set' if effort else 'not set'}"
        case OpdSettings():
            required = {"student": "", "teachers": ""}
        case EvalSettings():
            if not roles & {"models", "before", "teachers", "after"}:
                yield "inputs", "names no model; give models, or before, teachers and after (for the fusion table)"
            elif "models" in roles and roles & {"before", "teachers", "after"}:
                yield "inputs", "give either models, or before, teachers and after"
            elif "models" not in roles:
                required = dict.fromkeys(("before", "teachers", "after"), "the fusion table compares all three")
            if config.within is None:
                useless["budget"] = "config.within is not set"
            elif "models" in roles:
                required["budget"] = "config.within is set, and there is no `before` to stand in"
        case MergeSettings():
            required["models"] = ""
            why = f"config.merge.method is {config.merge.method}"
            (useless if isinstance(config.merge, WITHOUT_BASE) else required)["base"] = why
        case SampleSettings():
            required["model"] = ""
        case _:
            required["init"] = ""
    for role, why in required.items():
        if role not in roles:
            yield f"inputs.{role}", "required, and not set" + (f": {why}" if why else "")
    for role, why in useless.items():
        if role in roles:
            yield f"inputs.{role}", f"would not be read: {why}"


def _labels(inputs: Sequence[Input]) -> Iterator[Problem]:
    """Models compared in one table, or routed to, need names of their own."""
    listed = [given for given in inputs if given.role in ("models", "before", "teachers", "after")]
    seen: dict[str, str] = {}
    for given in listed:
        if given.label in seen:
            roles = " and ".join(dict.fromkeys((seen[given.label], given.role)))
            yield f"inputs.{given.role}", f"two models of {roles} are called '{given.label}'; give one another label"
        seen.setdefault(given.label, given.role)


# ---------------------------------------------------------------------------------------------- kinds


def _rlvr(config: RlvrSettings, pipeline: PipelineSettings) -> Iterator[Problem]:
    yield from _batches(config.rollout, config.train)
    if config.rollout.group_size < 2:
        yield "config.rollout.group_size", "1, but an advantage compares the completions of a group: give 2 or more"
    if config.effort is not None:
        yield from _budget("config.effort.budget", config.effort.budget, pipeline)


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


def _budget(key: str, budget: Budget, pipeline: PipelineSettings) -> Iterator[Problem]:
    yield from _effort(f"{key}.effort", budget.effort, pipeline)


def _opd(config: OpdSettings, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    yield from _batches(config.rollout, config.train)
    teachers = [given for given in inputs if given.role == "teachers"]
    if config.default_teacher is not None and config.default_teacher not in [given.label for given in teachers]:
        labels = [given.label for given in teachers]
        yield (
            "config.default_teacher",
            f"no teacher is called '{config.default_teacher}'" + near_miss(config.default_teacher, labels, "teachers"),
        )
    if isinstance(config.loss, TopKOpd) and isinstance(pipeline.model, NewModel):
        vocabulary = len(pipeline.model.tokenizer.words)
        if config.loss.k > vocabulary:
            yield "config.loss.k", f"{config.loss.k}, but the vocabulary has {vocabulary} words"
    if "effort" in config.route_by and not config.data.efforts:
        yield "config.route_by", "rows have no effort to route by: config.data.efforts is empty"
    elif teachers:
        yield from _coverage(config, config.route_by, teachers, config.default_teacher is not None)


def _eval(config: EvalSettings, inputs: Sequence[Input], pipeline: PipelineSettings) -> Iterator[Problem]:
    for k in config.pass_k:
        if k > config.rollout.group_size:
            yield "config.pass_k", f"{k} needs as many samples per prompt: rollout.group_size is smaller"
    if config.within is not None:
        yield from _budget("config.within.budget", config.within.budget, pipeline)
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
        yield from _coverage(config, known, teachers, False)


def _coverage(
    config: OpdSettings | EvalSettings, route_by: Sequence[str], teachers: Sequence[Input], default: bool
) -> Iterator[Problem]:
    """Exactly one teacher for each combination of columns that the data can hold."""
    routes: dict[tuple[str, ...], str] = {}
    for given in teachers:
        if lacking := [column for column in route_by if column not in given.route]:
            yield "inputs.teachers", f"'{given.label}' has no label '{lacking[0]}' to be routed by; give it a route"
            continue
        key = tuple(given.route[column] for column in route_by)
        if key in routes:
            yield "inputs.teachers", f"'{routes[key]}' and '{given.label}' are both for {_row(route_by, key)}"
        routes.setdefault(key, given.label)
    static = [at for at, column in enumerate(route_by) if column in STATIC_COLUMNS]
    values = {"domain": list(dict.fromkeys(config.data.tasks)), "effort": list(dict.fromkeys(config.data.efforts))}
    wanted = list(itertools.product(*(values[route_by[at]] for at in static)))
    covered = {tuple(key[at] for at in static) for key in routes}
    columns = [route_by[at] for at in static]
    bare = [_row(columns, key) for key in wanted if key not in covered]
    if bare and not default and static:
        hint = "add teachers, or set config.default_teacher" if isinstance(config, OpdSettings) else "add teachers"
        yield "inputs.teachers", f"no teacher for {'; '.join(bare)} ({hint})"
    for key, label in routes.items():
        if tuple(key[at] for at in static) not in wanted:
            yield "inputs.teachers", f"'{label}' is for {_row(route_by, key)}, which the data cannot hold"


def _row(columns: Sequence[str], key: Sequence[str]) -> str:
    return ", ".join(f"{column}={value}" for column, value in zip(columns, key, strict=True)) or "every row"


def _file_columns(settings: AnyStage, pipeline: PipelineSettings) -> list[str]:
    data = mixture(settings)
    named = [pipeline.tasks.get(name) for name in (data.tasks if data else ())]
    return list(dict.fromkeys(column for task in named for column in getattr(task, "columns", [])))


def _file_column_names(settings: OpdStage | AnyStage, pipeline: PipelineSettings) -> Iterator[Problem]:
    assert isinstance(settings, OpdStage)
    for column in settings.config.route_by:
        known = [*STATIC_COLUMNS, *_file_columns(settings, pipeline)]
        if column not in known:
            yield "config.route_by", f"rows have no column '{column}'" + near_miss(column, known, "columns")
        for name in settings.config.data.tasks if column not in STATIC_COLUMNS else ():
            task = pipeline.tasks.get(name)
            if column in known and column not in getattr(task, "columns", []):
                yield "config.route_by", f"tasks.{name}.columns does not have '{column}'"


def used_efforts(settings: AnyStage) -> list[str]:
    """Effort levels that the stage's result depends on."""
    config, data = settings.config, mixture(settings)
    used = list(data.efforts) if data else []
    if isinstance(config, RlvrSettings) and config.effort:
        used.append(config.effort.budget.effort)
    if isinstance(config, EvalSettings) and config.within:
        used.append(config.within.budget.effort)
    return used

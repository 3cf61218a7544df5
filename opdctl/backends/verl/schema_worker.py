"""Composes verl's configuration for a list of stages and has verl's own classes judge it. Runs in verl's environment.

Started by `opdctl.backends.verl.schema`, once for all stages of a plan: `import verl` takes seconds.
"""

import ast
import copy
import dataclasses
import functools
import importlib.util
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any

import ray
import verl
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import DistillationConfig

VERL = Path(verl.__file__).parent
_ROOTS = {"sft": "sft_trainer_engine", "rlvr": "ppo_trainer", "opd": "ppo_trainer"}
# of verl's classes, which assert, look up and convert, and of Hydra around them
_REFUSALS = (HydraException, OmegaConfBaseException, ValueError, TypeError, AssertionError, LookupError, RuntimeError)
_GROUPS = ("engine=", "optim=", "model_engine=")  # overrides that choose among verl's files rather than set a value


def main(asked: str, answer: str) -> None:
    """`asked` names a file with {"stages": [{"stage", "kind", "arguments"}]}, `answer` one to be written:
    {"version", "problems": {stage: [line]}}.
    """
    stages = json.loads(Path(asked).read_text())["stages"]
    problems = {}
    with initialize_config_dir(str(VERL / "trainer" / "config"), version_base=None):
        for stage in stages:
            problems[stage["stage"]] = list(judge(stage["kind"], stage["arguments"]))
    Path(answer).write_text(json.dumps({"version": verl.__version__, "problems": problems}))


def judge(kind: str, arguments: list[str]) -> Iterator[str]:
    """A line for everything that is wrong with an override list; verl's key first."""
    groups = tuple(argument for argument in arguments if argument.startswith(_GROUPS))
    base = _base(_ROOTS[kind], groups)
    try:
        overrides = [_parsed(argument) for argument in arguments if not argument.startswith((*_GROUPS, "hydra"))]
        if unknown := list(_misfits(base, overrides)):
            yield from unknown
            return
        config = copy.deepcopy(base)
        # what `compose` does once it has read the files, which takes it half a second a stage
        ConfigLoaderImpl._apply_overrides_to_config(overrides, config)
        yield from _sft(config) if kind == "sft" else _ppo(config)
    except _REFUSALS as error:
        yield _told(error)


@functools.cache
def _base(root: str, groups: tuple[str, ...]) -> DictConfig:
    return compose(root, overrides=list(groups))


@functools.cache
def _parsed(argument: str) -> Override:
    return OverridesParser.create().parse_override(argument)


def _told(error: Exception) -> str:
    """Hydra says where below, and the cause within: `actor_rollout_ref.actor: ValueError: ...`."""
    known = isinstance(error, HydraException | OmegaConfBaseException)
    text = (str(error) if known else f"{type(error).__name__}: {error}").replace("\\n", "\n")
    where = re.search(r"full_key: (\S+)\s*\Z", text)
    cause = re.search(r"^(\w+)\((['\"])(.*)\2\)$", text, re.MULTILINE | re.DOTALL)
    lines = (f"{cause[1]}: {cause[3]}" if cause else text).splitlines()
    said = " ".join(line.strip() for line in lines if line.strip() and "full_key:" not in line and "_type=" not in line)
    return f"{where[1]}: {said}" if where else said


# ------------------------------------------------------------------------------------------------------------- keys


def _misfits(base: DictConfig, overrides: list[Override]) -> Iterator[str]:
    """Keys that verl does not know, and values of another type than it declares."""
    for override in overrides:
        key, value = str(override.key_or_group), override.value()
        place = _find(base, key)
        if isinstance(place, Unknown):
            inside = f" in {place.above}" if place.above else ""
            yield f"{key}: verl has no '{place.part}'{inside}" + _meant(base, place)
        elif place is not None and (wanted := _wanted(place, value)):
            yield f"{key}: {value!r} is not {wanted}"


def _meant(base: DictConfig, place: "Unknown") -> str:
    if close := get_close_matches(place.part, place.names, n=1):
        return f"; did you mean '{place.above}.{close[0]}'?" if place.above else f"; did you mean '{close[0]}'?"
    elsewhere = [key for key in _all_keys(base) if key.rpartition(".")[2] == place.part]
    return f"; did you mean {' or '.join(map(repr, elsewhere[:3]))}?" if elsewhere else ""


def _all_keys(node: DictConfig, at: str = "") -> Iterator[str]:
    for name in map(str, node):
        key = f"{at}.{name}" if at else name
        yield key
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_interpolation() and not child._is_none():
            yield from _all_keys(child, key)


@dataclasses.dataclass(frozen=True)
class Unknown:
    above: str  # the last place on the way that verl has
    part: str  # of the key, that is not there
    names: list[str]  # that are


def _find(base: DictConfig, key: str) -> Any:
    """The type that verl declares for a key, None where it declares none, and Unknown for a key that neither its YAML
    nor the dataclass behind it has.
    """
    node: Any = base
    declared: Any = None
    parts = key.split(".")
    for number, part in enumerate(parts):
        place = ".".join(parts[:number])
        if (special := _SPECIAL.get(re.sub(r"teacher_models\.\w+", "teacher_models.*", place))) is not None:
            if (names := special()) and part not in names:
                return Unknown(place, part, names)
            node, declared = None, dict
            continue
        if _is_free(declared, node):
            return None  # whatever stands there
        fields, inner = _fields(declared, node), _element(declared)
        yaml = [str(name) for name in node] if _is_section(node) else []
        if part not in (*yaml, *fields) and inner is None:
            if _is_loose(fields, place) and part in _asked_for(place):
                return None
            return Unknown(place, part, sorted({*yaml, *fields} - {"_target_"}))
        node = node._get_node(part) if part in yaml else None
        declared = fields.get(part, inner)
    return declared


def _wanted(declared: Any, value: Any) -> str:
    """What a value should have been: where only plain types are declared and it is of none of them. Else empty."""
    options = _options(declared)
    plain = (bool, int, float, str, type(None))
    if declared is Any or not set(options) <= set(plain):
        return ""
    allowed = (*options, int) if float in options else options
    fits = type(value) in allowed or isinstance(value, QuotedString) and str in options
    return "" if fits else " or ".join("null" if option is type(None) else option.__name__ for option in options)


def _is_section(node: Any) -> bool:
    return isinstance(node, DictConfig) and not node._is_interpolation() and not node._is_none()


def _is_loose(fields: Mapping[str, Any], place: str) -> bool:
    """Is this a section that verl reads by name rather than through a dataclass?"""
    return not fields or place == "reward"  # RewardConfig is never instantiated


def _fields(declared: Any, node: Any) -> dict[str, Any]:
    """Fields of the dataclass behind a place: that of the YAML's `_target_`, else the declared one."""
    target = node.get("_target_") if _is_section(node) else None
    found = get_object(str(target)) if target else next(filter(dataclasses.is_dataclass, _options(declared)), None)
    if not dataclasses.is_dataclass(found):
        return {}
    hints = typing.get_type_hints(found)
    return {field.name: hints[field.name] for field in dataclasses.fields(found)}


def _options(declared: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return typing.get_args(declared) if typing.get_origin(declared) in (typing.Union, UnionType) else (declared,)


def _element(declared: Any) -> Any:
    """The type of the values, of a mapping from names to dataclasses; else None."""
    for option in _options(declared):
        arguments = typing.get_args(option)
        if typing.get_origin(option) is dict and dataclasses.is_dataclass(arguments[1]):
            return arguments[1]
    return None


def _is_free(declared: Any, node: Any) -> bool:
    """May anything stand below? A mapping whose entries neither the dataclass nor the YAML names."""
    if declared is None and _is_section(node) and not node:
        return True
    if declared is None or (_is_section(node) and "_target_" in node) or _element(declared) is not None:
        return False
    return any(option is Any or option is dict or typing.get_origin(option) is dict for option in _options(declared))


@functools.cache
def _asked_for(section: str) -> frozenset[str]:
    """Names that verl's code looks up in a section: those of the YAML files are not all."""
    files = VERL.joinpath("utils", "dataset").glob("*.py") if section == "data" else VERL.rglob("*.py")
    holder = "" if section == "data" else rf"\b{section.rpartition('.')[2]}"
    pattern = re.compile(holder + r"""\.get\(\s*["'](\w+)["']""")
    return frozenset(name for path in files for name in pattern.findall(path.read_text(errors="replace")))


@functools.cache
def _vllm_arguments() -> list[str]:
    """Engine arguments of vLLM, read from its source: importing it takes many seconds. Empty where it is not there."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or []) if spec else []
    names: list[str] = []
    for place in places:
        source = Path(place) / "engine" / "arg_utils.py"
        classes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ClassDef)]
        engine = [node for node in classes if node.name in ("EngineArgs", "AsyncEngineArgs")]
        assigned = [line for node in engine for line in node.body if isinstance(line, ast.AnnAssign)]
        names += [line.target.id for line in assigned if isinstance(line.target, ast.Name)]
    return names


def _engines() -> list[str]:
    return ["vllm", "sglang", "trtllm"]


@functools.cache
def _ray_arguments() -> list[str]:
    return [name for name in inspect.signature(ray.init).parameters if name != "kwargs"] + ["_temp_dir"]


_SPECIAL: dict[str, Callable[[], list[str]]] = {
    "ray_kwargs.ray_init": _ray_arguments,
    **{
        f"{at}.engine_kwargs{below}": names
        for at in ("actor_rollout_ref.rollout", "distillation.teacher_models.*.inference")
        for below, names in (("", _engines), (".vllm", _vllm_arguments))
    },
}


# ---------------------------------------------------------------------------------------------------------- classes


def _sft(config: DictConfig) -> Iterator[str]:
    for section in ("engine", "optim", "checkpoint", "profiler"):
        omega_conf_to_dataclass(config[section])
    yield from ()


def _ppo(config: DictConfig) -> Iterator[str]:
    """What `verl.trainer.main_ppo` and its workers make of the configuration, without models."""
    validate_config(config, need_reference_policy(config), need_critic(config))
    get_adv_estimator_fn(config.algorithm.adv_estimator)
    for section in (config.actor_rollout_ref.rollout, config.algorithm):
        omega_conf_to_dataclass(section)
    omega_conf_to_dataclass(_reference(config))
    yield from _distillation(config, omega_conf_to_dataclass(config.distillation))


def _reference(config: DictConfig) -> DictConfig:
    """As ActorRolloutRefWorker.init_model renames it (verl/workers/engine_workers.py)."""
    reference = config.actor_rollout_ref.ref.copy()
    OmegaConf.set_struct(reference, False)
    reference._set_parent(config.actor_rollout_ref)
    reference.use_dynamic_bsz = reference.pop("log_prob_use_dynamic_bsz")
    reference.ppo_max_token_len_per_gpu = reference.pop("log_prob_max_token_len_per_gpu")
    reference.ppo_micro_batch_size = reference.pop("log_prob_micro_batch_size")
    reference.ppo_micro_batch_size_per_gpu = reference.pop("log_prob_micro_batch_size_per_gpu")
    return typing.cast(DictConfig, reference)


def _distillation(config: DictConfig, made: DistillationConfig) -> Iterator[str]:
    """What verl lets pass, or only warns of."""
    if not made.enabled:
        return
    meant = [name for name in config.distillation.teacher_models if name != "teacher_model"]
    if len(made.teacher_models) != len(meant):
        yield f"distillation.teacher_models: verl would use {len(made.teacher_models)} of the {len(meant)} teachers"
    for key, teacher in made.teacher_models.items():
        if teacher.inference.load_format == "dummy":
            yield f"distillation.teacher_models: the server of '{key}' would have random weights (load_format: dummy)"
    loss = made.distillation_loss
    at, mode = "distillation.distillation_loss.use_policy_gradient", loss.loss_mode
    if mode.startswith("opdctl_"):
        if loss.use_policy_gradient or loss.use_task_rewards or loss.loss_max_clamp is not None:
            yield f"{at}: {mode} is the whole loss; verl may not make an advantage of it, add to it or clamp it"
    elif loss.loss_settings.use_topk and loss.use_policy_gradient:
        yield f"{at}: a top-k loss as the reward of the sampled token moves no other token: the gradient is not its own"
    elif loss.loss_settings.use_estimator and not loss.use_policy_gradient:
        yield f"{at}: {mode} of the sampled token, back-propagated directly, has not the gradient of the KL"

"""How stages are named and how they name each other: fan-out over axes, `max[domain=general]`, `stage:max[*]`."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from opdctl.errors import ConfigError
from opdctl.settings import FolderModel, Foreach, ModelSettings, RoundInput, WeightedInput

InputKind = Literal["stage", "model", "path", "hf", "gguf"]
Problem = tuple[str, str]  # key below the stage, what is wrong

ONE: Mapping[str, tuple[str, ...]] = {
    "sft": ("init",),
    "rlvr": ("init", "reference", "budget", "grader"),
    "opd": ("student", "reference"),
    "eval": ("before", "budget", "grader"),
    "merge": ("base",),
    "sample": ("model",),
    "select": ("report",),
}
MANY: Mapping[str, tuple[str, ...]] = {
    "sft": ("data",),
    "rlvr": (),
    "opd": ("teachers",),
    "eval": ("models", "teachers", "after"),
    "merge": ("models",),
    "sample": (),
    "select": ("models",),
}
LISTED = 24  # known words in a message: all checks of the gate
ROUND = "round"  # the axis of inputs with `first` and `then`
SEED = "seed"  # the axis that `seeds` adds
_SEEDED = re.compile(rf"\[{SEED}=(-?\d+)\]|,{SEED}=(-?\d+)(?=[,\]])|(?<=\[){SEED}=(-?\d+),")
FORMS = (
    "stage:NAME, stage:NAME[axis=value], stage:NAME[*] (lists only), model:, path:DIR, hf:REPO@REVISION or gguf:FILE"
)


@dataclass(frozen=True)
class Input:
    """One resolved reference of a stage."""

    role: str
    kind: InputKind
    target: str  # a stage's name; "" for a new model; a folder or file; REPO@REVISION
    route: Mapping[str, str]
    weight: float
    label: str

    @property
    def ref(self) -> str:
        return f"{self.kind}:{self.target}"


def near_miss(word: Any, options: Iterable[str], what: str) -> str:
    """` (did you mean 'lr'? keys: lr, betas)`, to put behind a message about an unknown word."""
    known = list(options)
    close = get_close_matches(str(word), known, n=1)
    shown = ", ".join(known[:LISTED]) + (f" and {len(known) - LISTED} more" if len(known) > LISTED else "")
    meant = f"did you mean '{close[0]}'? " if close else ""
    return f" ({meant}{what}: {shown or 'none'})"


# ---------------------------------------------------------------------------------------------- fan-out


def fan_out(foreach: Foreach) -> list[dict[str, Any]]:
    """The values of each axis, one mapping an instance: rows of `zip` within the combinations of `product`."""
    axes = list(foreach.product)
    products = [dict(zip(axes, values, strict=True)) for values in itertools.product(*foreach.product.values())]
    rows = [dict(zip(foreach.zip, values, strict=True)) for values in zip(*foreach.zip.values(), strict=True)]
    return [product | row for product in products for row in rows or [{}]]


def check_foreach(foreach: Foreach, axes: Mapping[str, Sequence[Any]]) -> Iterator[Problem]:
    for form, listed in (("product", foreach.product), ("zip", foreach.zip)):
        for axis, values in listed.items():
            key = f"foreach.{axis}"
            if not values:
                yield key, "the axis has no values, so there would be no stage"
            for value in dict.fromkeys(value for value in values if values.count(value) > 1):
                if form == "product":
                    yield key, f"'{value}' is there twice"
            for value in values if axis in axes else ():
                if value not in axes[axis]:
                    yield (
                        key,
                        f"axis '{axis}' has no value '{value}'" + near_miss(value, map(str, axes[axis]), "values"),
                    )
    lengths = {axis: len(values) for axis, values in foreach.zip.items()}
    if len(set(lengths.values())) > 1:
        yield "foreach.zip", "axes differ in length: " + ", ".join(f"{axis} has {n}" for axis, n in lengths.items())
    if both := sorted(foreach.product.keys() & foreach.zip.keys()):
        yield "foreach", f"axis '{both[0]}' is in product and in zip"
    if not foreach.product and not foreach.zip:
        yield "foreach", "names no axis; write {AXIS: values}, or leave it out"


def address(base: str, each: Mapping[str, Any]) -> str:
    return f"{base}[{','.join(f'{axis}={value}' for axis, value in each.items())}]" if each else base


def add_axis(name: str, axis: str, value: Any) -> str:
    """sft -> sft[seed=0], max[domain=math] -> max[domain=math,seed=0]"""
    return f"{name.removesuffix(']')}{',' if name.endswith(']') else '['}{axis}={value}]"


def unseeded(name: str) -> tuple[str, int | None]:
    """`mopd[loss=topk,seed=1]` -> `mopd[loss=topk]`, 1."""
    found = _SEEDED.search(name)
    return (name[: found.start()] + name[found.end() :], int(found[found.lastindex or 0])) if found else (name, None)


def without_seeds(text: str) -> str:
    """A text with the axis `seed` taken out of every stage's name in it."""
    return _SEEDED.sub("", text)


# ---------------------------------------------------------------------------------------------- selection


class Addresses:
    """The names of all stage instances, to select from."""

    def __init__(self, names: Iterable[str]) -> None:
        self._instances: dict[str, dict[str, dict[str, str]]] = {}  # base -> name -> axis -> value
        for name in names:
            base, axes = _split(name)
            self._instances.setdefault(base, {})[name] = dict(pair.partition("=")[::2] for pair in axes)

    def select(self, selector: str) -> list[str]:
        """`max`, `max[*]`, `max[domain=general]`, in the order of the stages; raises ConfigError if nothing matches."""
        base, axes = _split(selector)
        instances = self._instances.get(base)
        if instances is None:
            raise ConfigError(f"no stage is called '{base}'" + near_miss(base, self._instances, "stages"))
        if selector in instances:
            return [selector]
        if axes in ([], ["*"]):
            return list(instances)
        wanted = dict(pair.partition("=")[::2] for pair in axes)
        for axis, value in wanted.items():
            values = dict.fromkeys(own[axis] for own in instances.values() if axis in own)
            if not values:
                known = dict.fromkeys(itertools.chain.from_iterable(instances.values()))
                raise ConfigError(f"stage '{base}' has no axis '{axis}'" + near_miss(axis, known, "axes"))
            if value not in values:
                raise ConfigError(f"'{base}' has no instance with {axis}={value}" + near_miss(value, values, "values"))
        found = [name for name, own in instances.items() if wanted.items() <= own.items()]
        if not found:
            raise ConfigError(f"no instance is called '{selector}'" + near_miss(selector, instances, "instances"))
        return found

    def before(self, selector: str, each: Mapping[str, Any], value: Any) -> str:
        """The address with the axis `round` at `value`; axes that it does not name are as in `each`, if there are."""
        base, pairs = _split(selector)
        named = dict(pair.partition("=")[::2] for pair in pairs if pair != "*")
        if ROUND in named:
            raise ConfigError(f"'stage:{selector}' names its round; `then` is always of the round before")
        known = {axis for own in self._instances.get(base, {}).values() for axis in own}
        shared = {axis: given for axis, given in each.items() if axis in known} if "*" not in pairs else {}
        return address(base, shared | named | {ROUND: value})


def select(names: Iterable[str], selector: str) -> list[str]:
    """Names of the instances that `max`, `max[*]` or `max[domain=general]` means; ConfigError if there is none."""
    return Addresses(names).select(selector)


def _split(name: str) -> tuple[str, list[str]]:
    base, bracket, rest = name.partition("[")
    return base, [pair.strip() for pair in rest.removesuffix("]").split(",")] if bracket else []


# ---------------------------------------------------------------------------------------------- inputs


def parse_reference(ref: str, model: ModelSettings | None) -> tuple[InputKind, str]:
    """Kind and target; `model:` stands for what the pipeline's `model` says. Raises ConfigError."""
    scheme, colon, target = ref.partition(":")
    match scheme if colon else "":
        case "model" if not target:
            return parse_reference(model.ref, None) if isinstance(model, FolderModel) else ("model", "")
        case "stage" if re.fullmatch(r"[^\[\]]+(\[[^\[\]]+\])?", target):
            return "stage", target
        case "path" if target:
            return "path", target
        case "gguf" if target:
            return "gguf", target
        case "hf" if re.fullmatch(r"[\w.-]+(/[\w.-]+)?@[\w./-]+", target):
            return "hf", target
        case "hf":
            raise ConfigError(f"'{ref}' names no revision; write hf:REPO@REVISION, best with a commit")
    raise ConfigError(f"'{ref}' is not a reference; write {FORMS}")


@dataclass(frozen=True)
class Place:
    """Where an instance stands in its fan-out."""

    each: Mapping[str, Any]
    rounds: Sequence[Any]  # values of the axis `round`, in order; empty without it


@dataclass(frozen=True)
class Resolver:
    """What references may mean in one pipeline."""

    model: ModelSettings | None
    addresses: Addresses
    labels: Mapping[str, Mapping[str, str]]  # stage name -> its labels
    unknown: frozenset[str]  # stages whose fan-out has an error: what refers to them is left out

    def resolve(
        self, kind: str, inputs: Mapping[str, Any], columns: Sequence[str], place: "Place"
    ) -> tuple[tuple[Input, ...], list[Problem]]:
        """The inputs of a stage of this kind; models from stages are routed by those of their labels in `columns`."""
        resolved: list[Input] = []
        problems: list[Problem] = []
        one, many = ONE[kind], MANY[kind]
        for role, given in inputs.items():
            key = f"inputs.{role}"
            if role not in one + many:
                problems.append((key, "unknown role" + near_miss(role, one + many, f"roles of {kind}")))
            elif role in one and isinstance(given, list):
                problems.append((key, "takes one model, not a list"))
            elif given == []:
                problems.append((key, "is an empty list"))
            else:
                for at, item in enumerate(given if isinstance(given, list) else [given]):
                    try:
                        one_round = self._in_round(item, place) if isinstance(item, RoundInput) else item
                        resolved += self._one(role, one_round, role in many, columns)
                    except ConfigError as error:
                        problems.append((f"{key}.{at}" if isinstance(given, list) else key, str(error)))
        return tuple(resolved), problems

    def _in_round(self, given: RoundInput, place: "Place") -> str:
        """The reference that counts in the stage's round."""
        if ROUND not in place.each:
            raise ConfigError("first and then need the axis 'round' on this stage: foreach: {round: [1, 2]}")
        at = place.rounds.index(place.each[ROUND])
        if at == 0:
            return given.first
        kind, target = parse_reference(given.then, self.model)
        if kind != "stage":
            raise ConfigError(f"then: '{given.then}' is no stage, so it has no round before; name a stage")
        if target.partition("[")[0] in self.unknown:
            return given.then
        return f"stage:{self.addresses.before(target, place.each, place.rounds[at - 1])}"

    def _one(self, role: str, given: str | WeightedInput, many: bool, columns: Sequence[str]) -> Iterator[Input]:
        item = WeightedInput(ref=given) if isinstance(given, str) else given
        if item.ref in self.labels:
            raise ConfigError(f"'{item.ref}' is not a reference; did you mean 'stage:{item.ref}'?")
        kind, target = parse_reference(item.ref, self.model)
        if kind != "stage":
            yield Input(role, kind, target, dict(item.route), item.weight, item.label or f"{kind}:{target}")
            return
        if target.partition("[")[0] in self.unknown:
            return
        found = self.addresses.select(target)
        if len(found) > 1 and (not many or "[" not in target):
            all_of = f"; stage:{target}[*] means all of them" if many and "[" not in target else ""
            names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise ConfigError(f"'{item.ref}' is {len(found)} stages ({names}), not one{all_of}")
        if target.endswith("[*]") and not many:
            raise ConfigError(f"'{item.ref}': [*] is for lists of models; name the one stage")
        if len(found) > 1 and item.label:
            raise ConfigError(f"label: '{item.label}' would be the name of {len(found)} models")
        for name in found:
            own = {column: value for column, value in self.labels[name].items() if column in columns}
            yield Input(role, "stage", name, dict(item.route) or own, item.weight, item.label or name)

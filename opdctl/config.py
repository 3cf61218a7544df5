"""A YAML file and overrides to a `Pipeline`: Hydra composes, OmegaConf resolves, `expand` does the rest.

Nothing past this module sees Hydra or OmegaConf. Objects are never made from YAML: Hydra only merges here.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdctl import secrets
from opdctl.composition import composition_problem, first_line, override_problem, yaml_problem
from opdctl.errors import ConfigError
from opdctl.missing import missing_files
from opdctl.pipeline import Pipeline, expand
from opdctl.references import near_miss
from opdctl.templates import InstanceOverride, Late, marker
from opdctl.validation import BROKEN

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

_INSTANCE = re.compile(r"^(?P<sign>\+\+|\+|~)?stages\.(?P<selector>[^.=\[\]]+\[[^\]]*\])(?P<rest>.*)$", re.DOTALL)
_KEY = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[^=+~][^=]*)(?P<rest>=.*)?$", re.DOTALL)
_EACH = re.compile(r"\$\{each\.([^{}]*)\}")
_PLAIN = re.compile(r"\$\{([\w.-]+)\}")  # an interpolation without another inside
_SECRET = re.compile("\0secret:(\\w+)\0")  # a secret while OmegaConf has it, see `_environment`


def builtin_folder() -> Path:
    """Where the packaged conf/ and pipelines/ are: inside the wheel, or at the top of a checkout."""
    inside = Path(__file__).parent / "builtin"
    return inside if inside.is_dir() else Path(__file__).parent.parent


def load_pipeline(path: str | Path, overrides: Sequence[str] = (), *, workspace: Path | None = None) -> Pipeline:
    """The pipeline of a file, or of a packaged name, with overrides in Hydra's syntax.

    `stages.max[domain=general].KEY=VALUE` overrides one instance. `workspace` (default: the current folder) is where
    relative paths in the pipeline start. Raises ConfigError with every problem.
    """
    file, source = _find(str(path))
    folder = Path(os.path.abspath(workspace or Path.cwd()))
    _environment()
    confs = [conf for conf in (file.parent.parent / "conf", builtin_folder() / "conf") if conf.is_dir()]
    instances = [text for text in overrides if _INSTANCE.match(text)]
    plain = [_forced(text, confs) for text in overrides if not _INSTANCE.match(text)]
    config = _compose(file, source, list(dict.fromkeys(confs)), plain)
    problems = [*_made_up(config, overrides), *_one_seed(config)]
    resolution = _Resolution(config)
    tree = resolution.tree()
    parsed = [resolution.override(text) for text in instances]
    pipeline = expand(tree, parsed, source=source, folder=folder, problems=problems + resolution.problems)
    if missing := list(missing_files(pipeline)):
        raise ConfigError(missing, hint=f"relative paths start at the workspace, {folder}")
    return pipeline


def _find(path: str) -> tuple[Path, str]:
    file = Path(path)
    if file.is_file():
        if file.suffix != ".yaml":
            raise ConfigError(f"{path}: the name of a pipeline file ends in .yaml")
        return Path(os.path.abspath(file)), path
    packaged = {found.stem: found for found in sorted((builtin_folder() / "pipelines").glob("*.yaml"))}
    if path in packaged:
        return packaged[path], f"packaged {path}"
    for meant in (Path(f"{path}.yaml"), Path("pipelines", f"{path}.yaml"), Path("pipelines", path)):
        if meant.is_file():
            raise ConfigError(f"{path}: no such file, and no packaged pipeline", hint=f"is {meant} meant?")
    raise ConfigError(f"{path}: no such file, and no packaged pipeline" + near_miss(path, packaged, "packaged"))


# ---------------------------------------------------------------------------------------------- composition


def _forced(text: str, confs: Sequence[Path]) -> str:
    """`key=value` as `++key=value`, so that a key may be set whether the file has it or not.

    Validation knows all keys and finds misspelt ones, but in these free mappings; there Hydra asks for the `+`.
    """
    found = _KEY.match(text)
    if not found or found["sign"] or found["rest"] is None:
        return text
    key = found["key"]
    group = "@" in key or "/" in key or any((conf / key).is_dir() for conf in confs)
    top, *below = key.split(".")
    free = top in ("scale", "axes", "hydra") or (top == "tasks" and len(below) < 2)
    return text if group or free else f"++{text}"


def _compose(file: Path, source: str, confs: Sequence[Path], overrides: Sequence[str]) -> "DictConfig":
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]  # its stubs for one name

    search = ",".join(_quoted(f"file://{conf}") for conf in confs)
    try:
        with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
            return compose(file.name, overrides=[f"hydra.searchpath=[{search}]", *overrides])
    except OverrideParseException as error:
        raise override_problem(error.override, error.message) from error
    except YAMLError as error:
        raise ConfigError(yaml_problem(error)) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: a group set to null
        told = f"{error} {error.__cause__ or ''}"
        absent = re.search(r"Could not override '([^']*)'.*?Key '([^']*)' is not in struct", told, re.DOTALL)
        if absent:
            values = [text for text in overrides if "." not in text.partition("=")[0]]
            meant = _meant(_compose(file, source, confs, values), absent[1])
            key = absent[1] if meant else f"{absent[1]}.{absent[2]}"
            hint = f"to add it nevertheless: +{key}=VALUE"
            raise ConfigError(f"{key}: there is no such key{meant}", hint=hint) from error
        raise composition_problem(error, source) from error


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _made_up(config: "DictConfig", overrides: Sequence[str]) -> list[str]:
    """An override that makes a stage or a task up is a misspelt name. A task may be added whole, with a `+`."""
    from omegaconf import OmegaConf, open_dict

    problems: list[str] = []
    whole = OmegaConf.to_container(config, resolve=False)
    for top, word, mark in (("stages", "stage", {"kind"}), ("tasks", "task", {"task", "path"})):
        named = whole.get(top) if isinstance(whole, dict) else None
        if not isinstance(named, dict):
            continue  # `expand` tells what is wrong with it
        real = [str(name) for name, body in named.items() if isinstance(body, dict) and body.keys() & mark]
        for text in overrides:
            found = _KEY.match(text)
            parts = found["key"].split(".") if found else []
            if parts[:1] == [top] and len(parts) > 2 and "[" not in parts[1] and parts[1] not in real:
                problems.append(f"override {text}: no {word} is called '{parts[1]}'" + near_miss(parts[1], real, top))
                with open_dict(config):
                    config[top].pop(parts[1], None)
    return problems


def _one_seed(config: "DictConfig") -> Iterator[str]:
    """With `seeds`, an interpolation of `seed` would be the same for all of them."""
    from omegaconf import OmegaConf

    def walk(node: Any, key: str) -> Iterator[str]:
        if isinstance(node, dict | list):
            for name, value in node.items() if isinstance(node, dict) else enumerate(node):
                yield from walk(value, f"{key}.{name}".lstrip("."))
        elif isinstance(node, str) and "seed" in _PLAIN.findall(node):
            yield f"{key}: ${{seed}} is one for all, and seeds gives each stage its own: leave the key out"

    whole = OmegaConf.to_container(config, resolve=False)
    if isinstance(whole, dict) and whole.get("seeds"):
        yield from walk(whole, "")


def _environment() -> None:
    """`${oc.env:NAME}` and `${secret:NAME}` of a secret resolve to a reference; none of its letters enters a pipeline.

    OmegaConf would read a reference as an interpolation, so that it is marked in another way until it is plain data.
    """
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def marked(reference: str) -> str:
        return secrets.REFERENCE.sub("\0secret:\\1\0", reference)

    def env(name: str, *default: Any) -> Any:
        reference = secrets.from_environment(name)
        return oc.env(name, *default) if reference is None else marked(reference)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    OmegaConf.register_new_resolver("secret", lambda name: marked(secrets.reference(name)), replace=True)


def _referring(value: Any) -> Any:
    match value:
        case dict():
            return {key: _referring(item) for key, item in value.items()}
        case list():
            return [_referring(item) for item in value]
        case str():
            return _SECRET.sub(r"${secret:\1}", value)
    return value


# ---------------------------------------------------------------------------------------------- resolution


@dataclass
class _Resolution:
    """Replaces interpolations by what they refer to, keeping every failure with its key.

    `${each.AXIS}` becomes a marker, so that a stage is resolved once and not for each of its instances. Only a value
    that depends on the instance otherwise, as `${scale.loss.${each.loss}}` does, is looked up for each (`Late`).
    """

    config: "DictConfig"
    failures: list[tuple[str, str, str]] = field(default_factory=list)  # key, its interpolation, what is wrong
    axes: dict[str, list[str]] = field(default_factory=dict)  # stage -> axes of its foreach

    @property
    def problems(self) -> list[str]:
        """Each failure where it is, and not again at the keys that refer to it."""
        failed = {key for key, _, _ in self.failures}
        first = [
            f"{key}: {text}"
            for key, raw, text in self.failures
            if not any(_overlap(reference, other) for reference in _PLAIN.findall(raw) for other in failed - {key})
        ]
        return first or [f"{key}: {text}" for key, _, text in self.failures]  # all of a circle refer to each other

    def tree(self) -> dict[str, Any]:
        from omegaconf import OmegaConf

        raw = OmegaConf.to_container(self.config, resolve=False)
        assert isinstance(raw, dict)
        stages = raw.pop("stages", None)
        self._set_each({})
        tree = {str(key): self._resolve(self.config, key, value, str(key), []) for key, value in raw.items()}
        if isinstance(stages, dict):
            stages = {name: self._stage(str(name), body) for name, body in stages.items()}
        return tree | {"stages": stages}

    def override(self, text: str) -> InstanceOverride:
        """`stages.max[domain=general].config.train.lr=1e-3`, its value read as Hydra reads values."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import OverrideParseException
        from omegaconf import OmegaConf

        found = _INSTANCE.match(text)
        assert found is not None
        selector, rest = found["selector"], found["rest"]
        if not rest.startswith("."):
            raise ConfigError(f"override {text}: names no key; write stages.{selector}.KEY=VALUE")
        try:
            parsed = OverridesParser.create().parse_overrides([f"{found['sign'] or ''}{rest[1:]}"])[0]
        except OverrideParseException as error:
            raise override_problem(text, error.message) from error
        if parsed.is_sweep_override():
            raise ConfigError(f"override {text}: is several values; for a list write [a, b]")
        path = tuple(parsed.key_or_group.split("."))
        if parsed.is_delete():
            return InstanceOverride(text, selector, path, None, delete=True)
        holder = OmegaConf.create({"value": parsed.value()}, parent=self.config)
        raw = OmegaConf.to_container(holder, resolve=False)
        assert isinstance(raw, dict)
        axes = self.axes.get(selector.partition("[")[0], [])
        self._set_each({axis: marker(axis) for axis in axes})
        value = self._resolve(holder, "value", raw["value"], f"override {text}", axes)
        return InstanceOverride(text, selector, path, value)

    def _stage(self, name: str, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        node, key = self.config.stages[name], f"stages.{name}"
        self._set_each({})
        foreach = self._resolve(node, "foreach", raw["foreach"], f"{key}.foreach", []) if "foreach" in raw else None
        axes = self.axes[name] = _axis_names(foreach)
        self._set_each({axis: marker(axis) for axis in axes})
        body = {part: value for part, value in raw.items() if part != "foreach"}
        done = {part: self._resolve(node, part, value, f"{key}.{part}", axes) for part, value in body.items()}
        return done | ({} if foreach is None else {"foreach": foreach})

    def _resolve(self, parent: "DictConfig | ListConfig", name: Any, raw: Any, key: str, axes: Sequence[str]) -> Any:
        if isinstance(raw, dict | list) and raw:
            node = parent[name]
            items = raw.items() if isinstance(raw, dict) else enumerate(raw)
            done = {part: self._resolve(node, part, value, f"{key}.{part}", axes) for part, value in items}
            return done if isinstance(raw, dict) else list(done.values())
        if isinstance(raw, str) and "\0" in raw:  # stands for `${each.AXIS}` and the like from here on
            self.failures.append((key, raw, "has a NUL character in it: leave it out"))
            return BROKEN
        if not isinstance(raw, str) or "${" not in raw:
            return raw
        if _has_nested_each(raw):
            return self._late(parent, name, raw)
        try:
            return self._look_up(parent, name, raw)
        except ConfigError as error:
            if axes:  # by way of another key it may depend on the instance
                return self._late(parent, name, raw)
            self.failures.append((key, raw, str(error)))
            return BROKEN

    def _late(self, parent: "DictConfig | ListConfig", name: Any, raw: str) -> Late:
        known: dict[tuple[Any, ...], Any] = {}
        mentioned = set(_EACH.findall(raw))

        def value(each: Mapping[str, Any]) -> Any:
            own = {axis: value for axis, value in each.items() if axis in mentioned} if mentioned else each
            values = tuple(own.values())
            if values not in known:
                self._set_each(each)
                known[values] = self._look_up(parent, name, raw)
            return known[values]

        return value

    def _set_each(self, each: Mapping[str, Any]) -> None:
        from omegaconf import open_dict

        with open_dict(self.config):
            self.config["each"] = dict(each)

    def _look_up(self, parent: "DictConfig | ListConfig", name: Any, raw: str) -> Any:
        """Raises ConfigError, without the key."""
        from omegaconf import OmegaConf
        from omegaconf.errors import InterpolationKeyError, InterpolationToMissingValueError, OmegaConfBaseException

        try:
            value = parent[name]
            return _referring(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)
        except InterpolationToMissingValueError as error:
            missing = first_line(str(error)).rpartition(" ")[2]
            raise ConfigError(f"'{raw}' refers to {missing}, which is required, and not set") from error
        except InterpolationKeyError as error:
            found = re.search(r"'([^']*)' not found", str(error))
            meant = _meant(self.config, found[1]) if found else ""
            raise ConfigError(f"'{raw}' refers to nothing{meant}") from error
        except OmegaConfBaseException as error:
            if (ours := _ours(error)) is not None:
                raise ConfigError(f"'{raw}': {ours} ({ours.hint})") from error
            raise ConfigError(f"'{raw}': {first_line(str(error))}") from error


def _ours(error: BaseException | None) -> ConfigError | None:
    """What a resolver of ours raised; OmegaConf wraps it more than once."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__context__
    return error


def _meant(config: "DictConfig", key: str) -> str:
    """Keys beside the first part of `key` that is not there."""
    from omegaconf import OmegaConf

    parts = key.split(".")
    if parts[0] == "each" and not config.get("each"):
        return " ('${each.AXIS}' is for stages with foreach)"
    for at, part in enumerate(parts):
        above = ".".join(parts[:at])
        node = OmegaConf.select(config, above) if above else config
        if not OmegaConf.is_dict(node):
            break
        if part not in node:
            options = [str(name) for name in node if at or name != "each"]
            return near_miss(part, options, f"keys of {above}" if above else "keys")
    return ""


def _overlap(a: str, b: str) -> bool:
    """Are two keys the same, or one within the other?"""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _axis_names(foreach: Any) -> list[str]:
    """Of the short form or of the two long ones; what is malformed is told by `expand`."""
    if not isinstance(foreach, dict):
        return []
    if foreach.keys() & {"product", "zip"}:
        return [str(axis) for form in foreach.values() if isinstance(form, dict) for axis in form]
    return [str(axis) for axis in foreach]


def _has_nested_each(text: str) -> bool:
    depth = 0
    for part in re.finditer(r"\$\{(each\.)?|\}", text):
        if part[1] and depth:
            return True
        depth += -1 if part[0] == "}" else 1
    return False

"""What Hydra and OmegaConf say of a pipeline that does not compose, in one line with the key and what to do."""

import re

from opdctl.errors import ConfigError
from opdctl.references import near_miss

_GRAMMAR = "write KEY=VALUE; quote values with blanks, commas or brackets: KEY='\"a, b\"'. Hydra's grammar applies"


def override_problem(text: str, told: str) -> ConfigError:
    lines = [line.strip() for line in told.splitlines() if line.strip() and not line.strip().startswith("See http")]
    why = "a character that needs quotes" if lines[-1] == "^" else lines[-1]
    return ConfigError(f"override {text.removeprefix('++')}: {why}", hint=_GRAMMAR)


def yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}:{mark.line + 1}:{mark.column + 1}" if mark else "YAML"
    told = (getattr(error, "context", None), getattr(error, "problem", None))
    return f"{where}: not valid YAML: {', '.join(part for part in told if part) or error}"


def composition_problem(error: Exception, file: str) -> ConfigError:
    """Hydra tells over several lines, with the folders that it searched, what fits in one. `file`: as it was named."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if several := re.search(r"Ambiguous value for argument '(?:\+\+)?([^']*)'", str(error)):
        return ConfigError(f"override {several[1]}: is several values; for a list write [a, b]")
    if group := re.search(r"Could not override '([^']*)'\.\s+Did you mean to override ([^\s?]*)", str(error)):
        text = f"override {group[1]}: the defaults of {file} have no such entry (did you mean '{group[2]}'?)"
        return ConfigError(text, hint=f"to choose, {group[2]}=NAME; to add an entry, write it into the defaults")
    if twice := re.search(r"Multiple values for ([^\s]*)\. To override", str(error)):
        return ConfigError(f"{file}: defaults: '{twice[1]}' is there twice; leave one of them out")
    missing = getattr(error, "missing_cfg_file", None)
    if missing is not None:
        options = list(getattr(error, "options", None) or [])
        wanted = str(missing).rpartition("/")
        text = f"{file}: no '{wanted[2]}' in group '{wanted[0]}'" if wanted[0] else f"{file}: no '{missing}'"
        return ConfigError(text + near_miss(wanted[2], options, "options"))
    cause = [line.strip() for line in str(error.__cause__ or "").splitlines() if line.strip()]
    key = getattr(error.__cause__, "full_key", None) or getattr(error, "full_key", None)
    told = " ".join([*lines[:1], *(line for line in cause[:1] if line not in lines[:1])])
    if "Cannot merge DictConfig with ListConfig" in str(error) and not key:
        return ConfigError(f"{file}: a key is a list here and a mapping in a group of the defaults, or reversed")
    if key and "Cannot merge DictConfig with ListConfig" in told:
        kinds = ("a list", "a mapping")  # what stands there, what the override gives
        return ConfigError(f"{key}: must be {kinds['={' not in told]}, not {kinds['={' in told]}")
    return ConfigError((f"{key}: " if key else f"{file}: ") + told)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "cannot be read")

"""Trees of stages before they are validated: values that differ by instance, and overrides of single instances."""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opdctl.errors import ConfigError
from opdctl.references import Problem
from opdctl.validation import BROKEN

Late = Callable[[Mapping[str, Any]], Any]  # a value that has to be looked up for each instance; raises ConfigError
_MARKER = re.compile(r"\x00each\.([^\x00]+)\x00")


@dataclass(frozen=True)
class InstanceOverride:
    """`stages.max[domain=general].config.train.lr=1e-3`"""

    text: str
    selector: str
    path: tuple[str, ...]
    value: Any
    delete: bool = False


def marker(axis: str) -> str:
    """Stands for `${each.AXIS}` in a tree."""
    return f"\0each.{axis}\0"


def fill(node: Any, each: Mapping[str, Any], key: str, defects: list[Problem]) -> Any:
    """A copy of the tree with the instance's values in the place of markers and of `Late` values."""
    if isinstance(node, str):
        if "\0" not in node:
            return node
        whole = _MARKER.fullmatch(node)
        return each[whole[1]] if whole else _MARKER.sub(lambda found: str(each[found[1]]), node)
    if isinstance(node, dict):
        return {name: fill(value, each, f"{key}.{name}" if key else str(name), defects) for name, value in node.items()}
    if isinstance(node, list):
        return [fill(value, each, f"{key}.{at}", defects) for at, value in enumerate(node)]
    if callable(node):
        try:
            return fill(node(each), each, key, defects)
        except ConfigError as error:
            defects.append((key, str(error)))
            return BROKEN
    return node


def apply(override: InstanceOverride, tree: Any, value: Any) -> str:
    """Change the tree of one instance; what stands in the way, or nothing. `value`: the override's, filled."""
    *folders, last = override.path
    for at, part in enumerate(folders):
        tree = tree.get(part) if override.delete else tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return f"{'.'.join(override.path[: at + 1])} holds no keys"
    if override.delete and last not in tree:
        return f"there is no key '{'.'.join(override.path)}' to remove"
    if override.delete:
        del tree[last]
    elif isinstance(tree.get(last), dict) and isinstance(value, dict):
        tree[last] = tree[last] | copy.deepcopy(value)
    else:
        tree[last] = copy.deepcopy(value)
    return ""

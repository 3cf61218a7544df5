"""Does verl itself take what it would be given? Asked in its own environment, once for all stages of a plan."""

from collections.abc import Mapping, Sequence

from opdctl.backends.contract import StageSpec


def check(specs: Sequence[StageSpec]) -> Mapping[str, list[str]]:
    """Stage -> every problem that verl's configuration classes find."""
    raise NotImplementedError

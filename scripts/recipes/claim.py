"""What a report says, what was measured here, and whether the one shows in the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opdctl.engine.scores import Estimate

MARGIN = (
    0.05  # a loss of as many points is called one; of prompts at laptop scale it takes a thousand a cell to tell less
)


@dataclass(frozen=True)
class Claim:
    """One row of docs/recipes.md."""

    said: str  # by the report, in our words, with its numbers
    measured: str  # here, with its numbers
    holds: bool | None  # None: what was measured does not decide it, or the report gives nothing to compare with


@dataclass(frozen=True)
class Table:
    """What a report prints as a table, measured here; a recipe's module may give one by `table(run)`."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def above(estimate: Estimate, bound: float = 0.0) -> bool | None:
    """Is it larger than the bound? None where its interval holds the bound: the samples do not decide."""
    if estimate.low > bound:
        return True
    return False if estimate.high < bound else None


def kept(difference: Estimate) -> bool | None:
    """For "nothing is lost": is a difference of rates above -MARGIN for certain, below it, or is that not decided?"""
    return above(difference, -MARGIN)


def opposite(verdict: bool | None) -> bool | None:
    return None if verdict is None else not verdict


def percent(estimate: Estimate | float) -> str:
    """`81.3 %`"""
    return f"{100 * (estimate.value if isinstance(estimate, Estimate) else estimate):.1f} %"


def points(estimate: Estimate | float) -> str:
    """Of a difference of rates: `+4.2 points (2.1 to 6.3)`."""
    if not isinstance(estimate, Estimate):
        return f"{100 * estimate:+.1f} points"
    return f"{100 * estimate.value:+.1f} points ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def listed(differences: Mapping[str, Estimate]) -> str:
    """`general.max +4.2 points (2.1 to 6.3); coding_agents.max ...`"""
    return "; ".join(f"{name} {points(difference)}" for name, difference in differences.items())


def lowest(differences: Mapping[str, Estimate]) -> Estimate:
    """The one with the smallest value: what has to hold of it holds of all."""
    return min(differences.values(), key=lambda difference: difference.value)

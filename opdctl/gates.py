"""Gates: bounds on the final metrics of a stage, and which of them a finished stage is outside of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opdctl.references import near_miss
from opdctl.settings import Gate


@dataclass(frozen=True)
class Broken:
    """A gate that a finished stage did not pass."""

    gate: Gate
    text: str  # "accuracy 0.31 < min 0.5"
    unknown: bool = False  # the stage has no such metric: nothing can be said, so nothing more may start
    known: str = ""  # " (metrics: loss, reward)", to put behind the text of an unknown one

    @property
    def action(self) -> str:
        return "stop" if self.unknown else self.gate.action


def broken(gates: Sequence[Gate], metrics: Mapping[str, float]) -> Iterator[Broken]:
    """Those outside of their bounds; NaN is outside of all. A metric that is not there stops, with those that are."""
    for gate in gates:
        value = metrics.get(gate.metric)
        if value is None:
            alike = sorted(
                (name for name in metrics if name.endswith(f"/{gate.metric}")), key=lambda name: name.count("/")
            )
            known = near_miss(gate.metric, alike or metrics, "metrics")
            yield Broken(gate, f"the stage has no metric '{gate.metric}'", unknown=True, known=known)
        elif gate.min is not None and not value >= gate.min:
            yield Broken(gate, f"{gate.metric} {value:.6g} < min {gate.min:g}")
        elif gate.max is not None and not value <= gate.max:
            yield Broken(gate, f"{gate.metric} {value:.6g} > max {gate.max:g}")


def describe(gate: Gate) -> str:
    """`0.5 <= accuracy <= 0.9, else stop`"""
    low = f"{gate.min:g} <= " if gate.min is not None else ""
    high = f" <= {gate.max:g}" if gate.max is not None else ""
    return f"{low}{gate.metric}{high}, else {gate.action}"

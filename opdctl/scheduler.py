"""Which stage starts next: parents first, the longest remaining chain first, never more than the machine has."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from opdctl.settings import Machine, Resources


@dataclass(frozen=True)
class Lease:
    """What one running stage has taken from the machine."""

    resources: Resources
    devices: tuple[int, ...]  # GPU ids


class Pool:
    """What is left of the machine."""

    def __init__(self, machine: Machine) -> None:
        self.slots, self.cpus = machine.slots, machine.cpus
        self.devices = list(range(machine.gpus))

    def take(self, wanted: Resources) -> Lease | None:
        """None while the machine has too little left."""
        if wanted.slots > self.slots or wanted.cpus > self.cpus or wanted.gpus > len(self.devices):
            return None
        self.slots -= wanted.slots
        self.cpus -= wanted.cpus
        leased, self.devices = self.devices[: wanted.gpus], self.devices[wanted.gpus :]
        return Lease(wanted, tuple(leased))

    def give_back(self, lease: Lease) -> None:
        self.slots += lease.resources.slots
        self.cpus += lease.resources.cpus
        self.devices = sorted([*self.devices, *lease.devices])


class Schedule:
    """The stages still to run. `upstream` names, for each, the stages among them that it reads."""

    def __init__(self, upstream: Mapping[str, Collection[str]]) -> None:
        self._waits_for = {stage: set(parents) & upstream.keys() for stage, parents in upstream.items()}
        self._children: dict[str, list[str]] = {stage: [] for stage in upstream}
        for stage, parents in self._waits_for.items():
            for parent in parents:
                self._children[parent].append(stage)
        self._depth: dict[str, int] = {}
        for stage in reversed(list(upstream)):  # children stand after their parents
            self._depth[stage] = 1 + max((self._depth[child] for child in self._children[stage]), default=0)

    def ready(self) -> list[str]:
        """Stages whose parents are done, the longest remaining chain first, else in the order of the plan."""
        return sorted((s for s, parents in self._waits_for.items() if not parents), key=lambda s: -self._depth[s])

    def start(self, stage: str) -> None:
        del self._waits_for[stage]

    def done(self, stage: str) -> None:
        for child in self._waits_for.keys() & set(self._children[stage]):
            self._waits_for[child].discard(stage)

    def failed(self, stage: str) -> list[str]:
        """Drops all that depends on the stage; returns it, in the order of the plan."""
        lost = {stage}
        for candidate, parents in self._waits_for.items():
            if parents & lost:
                lost.add(candidate)
        dropped = [candidate for candidate in self._waits_for if candidate in lost]
        for candidate in dropped:
            del self._waits_for[candidate]
        return dropped

    def clear(self) -> list[str]:
        """Drops all that has not started; returns it."""
        dropped = list(self._waits_for)
        self._waits_for.clear()
        return dropped

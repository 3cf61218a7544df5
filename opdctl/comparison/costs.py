"""What stages cost, each alone and with everything it was made from."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from opdctl.lineage import Node, trace
from opdctl.store import StageDir, Workspace

ASKING = ("rlvr", "opd", "eval", "sample")  # kinds that draw completions
ALONE = ("cpu_seconds", "peak_memory_gib", "expected_memory_gib", "sampled_tokens", "sampled_completions")
Spent = Mapping[str, float | None]  # None: a stage's backend does not tell


class Ledger:
    """Of some finished stages and their ancestors."""

    def __init__(self, workspace: Workspace, stages: Sequence[StageDir]) -> None:
        self._nodes = trace(workspace, stages)
        self._gpus = cache(lambda run, stage: _gpus(workspace, run, stage))

    def alone(self, record_id: str) -> Spent:
        """Seconds are of the last attempt; `gpu_seconds` are those times the GPUs leased, None without GPUs."""
        node = self._nodes[record_id]
        gpus = self._gpus(node.run, node.title)
        told = {name: node.metrics.get(name) for name in ALONE}
        return {"seconds": node.seconds, "gpu_seconds": node.seconds * gpus if gpus else None, **told}

    def with_ancestors(self, record_id: str) -> Spent:
        """Sums; each ancestor counts once. None where one of them does not tell, or its record is gone."""
        found = self._ancestors(record_id)
        if any(node.gone for node in found):
            return dict.fromkeys(("all_seconds", "all_cpu_seconds", "all_gpu_seconds", "all_sampled_tokens"))
        nodes = [node for node in found if node.kind]
        leased = [node.seconds * self._gpus(node.run, node.title) for node in nodes]
        return {
            "all_seconds": sum(node.seconds for node in nodes),
            "all_cpu_seconds": _total(node.metrics.get("cpu_seconds") for node in nodes),
            "all_gpu_seconds": sum(leased) if any(leased) else None,
            "all_sampled_tokens": _total(node.metrics.get("sampled_tokens") for node in nodes if node.kind in ASKING),
        }

    def _ancestors(self, record_id: str) -> list[Node]:
        found: dict[str, Node] = {}
        waiting = [record_id]
        while waiting:
            key = waiting.pop()
            if key not in found:
                found[key] = self._nodes[key]
                waiting += [edge.parent for edge in found[key].parents]
        return list(found.values())


def _gpus(workspace: Workspace, run: str, stage: str) -> int:
    described = workspace.run(run).read_pipeline().get("stages", {}).get(stage, {})
    return int(described.get("resources", {}).get("gpus", 0))


def _total(values: Iterable[float | None]) -> float | None:
    told = list(values)
    known = [value for value in told if value is not None]
    return sum(known) if len(known) == len(told) else None

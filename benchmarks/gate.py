"""What the gate costs beside the stage that it guards.

    make demo
    python benchmarks/gate.py [runs/kimi_k3]

For every stage of a run that has ended: seconds of wall time that asking the models took, for each student and teacher
(or task), the CPU seconds of the stage's steps, and the share. At most 10 s a pair are allowed in a laptop run.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from opdctl.engine.gate import check_models
from opdctl.settings import GateSettings
from opdctl.worker import read_spec

ALLOWED_S = 10.0  # a pair


class Unheard:
    def stop_requested(self) -> bool:
        return False

    def emit(self, step: int, total: int, metrics: Mapping[str, float], phase: str = "train") -> None: ...


def measured(run: Path) -> Iterator[tuple[str, int, float, float]]:
    """(stage, pairs, seconds of the gate, CPU seconds of the stage)."""
    for result in sorted(run.glob("stages/**/result.json")):
        spec = read_spec(result.with_name("spec.json"))
        began = time.perf_counter()
        verdicts = check_models(spec, GateSettings(), Unheard())
        seconds = time.perf_counter() - began
        own = json.loads(result.read_text())["metrics"].get("cpu_seconds", 0.0)
        yield spec.stage, len({verdict.subject for verdict in verdicts}), seconds, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/kimi_k3"))
    run = parser.parse_args().run
    if not (rows := list(measured(run))):
        print(f"gate: NOT MEASURED, {run} has no stage that has ended (make demo)", file=sys.stderr)
        return
    width = max(len(stage) for stage, *_ in rows)
    print(f"{'stage':{width}}  pairs    gate s  s a pair   stage s  share")
    for stage, pairs, seconds, own in rows:
        share = f"{seconds / own:6.1%}" if own else "     -"
        print(f"{stage:{width}} {pairs:6} {seconds:9.2f} {seconds / max(1, pairs):9.2f} {own:9.1f} {share}")
    slowest = max(seconds / max(1, pairs) for _, pairs, seconds, _ in rows)
    print(f"slowest: {slowest:.2f} s a pair, {ALLOWED_S:g} are allowed")


if __name__ == "__main__":
    main()

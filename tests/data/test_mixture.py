"""Every window of the rows that a mixture deals has all teachers in proportion."""

import json
from collections import Counter

import pytest

from opdctl.engine.rows import Mixer
from opdctl.settings import ChainTask, FileTask, Mixture
from opdctl.tasks import load_task


@pytest.fixture
def tasks(tmp_path):
    """Rows of a file in three kinds, 60 %, 30 % and 10 %, and two generated domains."""
    kinds = ["a"] * 600 + ["b"] * 300 + ["c"] * 100
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"q{n}", "a": n, "kind": kind}) + "\n" for n, kind in enumerate(kinds))
    )
    given = FileTask(
        path=str(tmp_path / "rows.jsonl"), prompt="q", answer="a", verifier="exact", columns=["kind"], held_out=0
    )
    chains = {domain: ChainTask(task="chain", domain=domain) for domain in ("math", "code")}
    return {name: load_task(name, one, None) for name, one in {"file": given, **chains}.items()}


@pytest.mark.parametrize("size", [20, 64, 100])
@pytest.mark.parametrize("ratios", [{}, {"file": 3, "math": 2}])
def test_every_window_has_all_teachers_in_proportion(tasks, ratios, size):
    """Routes are task and kind, so five teachers share the rows; windows begin anywhere, not at batches alone."""
    mixer = Mixer(tasks, Mixture(tasks=list(tasks), ratios=ratios), "train", 7)
    total = sum(ratios.get(task, 1) for task in tasks)
    kinds = {"a": 0.6, "b": 0.3, "c": 0.1}
    shares = {(task, None): ratios.get(task, 1) / total for task in ("math", "code")}
    shares |= {("file", kind): ratios.get("file", 1) / total * part for kind, part in kinds.items()}
    for start in range(0, 700, 13):
        seen = Counter((row.task, row.prompt.columns.get("kind")) for row in mixer.rows(start, size))
        for route, share in shares.items():
            assert abs(seen[route] - size * share) <= 4, (start, route, seen)

"""Workers of the embedded engine begin with what they need: the fork server has imported it."""

import subprocess
import sys
from pathlib import Path

from opdctl.backends import embedded

TESTS = Path(__file__).resolve().parents[1]
TRAIN = """
import sys
from importlib import import_module
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import engine.stages as stages
for module in sys.argv[3:]:
    import_module(module)
before = set(sys.modules)
stages.run(stages.sft(Path(sys.argv[2])))
print(*(name for name in sys.modules if name not in before and name.startswith("torch.")))
"""


def test_training_imports_next_to_nothing_of_torch_after_the_fork(tmp_path):
    """A second of CPU time a stage, otherwise: the first optimizer of a process imports 800 modules."""
    command = [sys.executable, "-c", TRAIN, TESTS, tmp_path / "sft", *embedded.preload(["sft"])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) <= 3


def test_stages_without_an_optimizer_wait_for_none():
    assert "torch._dynamo" not in embedded.preload(["eval", "merge"])
    assert "torch._dynamo" in embedded.preload(["eval", "opd"])

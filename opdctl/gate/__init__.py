"""The gate: may a stage start? Checks that files answer, before anything starts and again beside the models that were
just made; `opdctl/engine/gate.py` asks the models."""

from collections.abc import Sequence

from opdctl.backends.contract import StageSpec
from opdctl.settings import GateSettings
from opdctl.verdicts import Verdict


def check_files(spec: StageSpec, settings: GateSettings) -> list[Verdict]:
    """Verdicts on the inputs of a stage whose folders are there; without PyTorch."""
    found: Sequence[Verdict] = []
    return list(found)

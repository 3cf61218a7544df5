"""The gate's questions to models, data and graders: asked in the worker, before the stage trains."""

from opdctl.backends.contract import Control, StageSpec
from opdctl.settings import GateSettings
from opdctl.verdicts import Verdict


def check_models(spec: StageSpec, settings: GateSettings, control: Control) -> list[Verdict]:
    """Verdicts of what only models can answer. Raises Stopped where a stop is asked for meanwhile."""
    return []

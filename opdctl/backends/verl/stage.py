"""One attempt of a stage on verl: prepare, start, watch, publish."""

from opdctl.backends.contract import Control, StageResult, StageSpec


def run(spec: StageSpec, control: Control) -> StageResult:
    """Carry the stage out, resuming from `spec.state`."""
    raise NotImplementedError

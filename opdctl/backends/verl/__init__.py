"""Stages on verl: its trainers as child processes in an environment of their own, rollouts and teachers by vLLM."""

from collections.abc import Mapping, Sequence

from opdctl.backends.contract import Control, StageResult, StageSpec

REVISION = "verl-1"


def check(specs: Sequence[StageSpec]) -> Mapping[str, list[str]]:
    """What stops these stages from running here: verl's own classes look at what it would be given."""
    from opdctl.backends.verl.schema import check

    return check(specs)


def command(spec: StageSpec) -> str:
    """The trainer's command line, for a shell."""
    from opdctl.backends.verl.render import command

    return command(spec).shell()


def run(spec: StageSpec, control: Control) -> StageResult:
    """Carry the stage out, resuming from `spec.state`."""
    from opdctl.backends.verl.stage import run

    return run(spec, control)

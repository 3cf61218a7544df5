"""A user's own rows: a prompt and a reference answer each (`mapping.py`), judged by a named verifier.

All files (`shards.py`) are read and checked when the task is made, so that a bad row is found before any training.
Without `eval_path`, rows are held out by a hash of their prompt (runs of blanks count as one), so that copies of a
prompt stay on one side.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from opdctl.errors import ConfigError, StageFailed
from opdctl.settings import AnyTask, EffortSettings, FileTask
from opdctl.tasks import Demonstration, Prompt, Split, Verdict, effort_wording, first_group, is_held_out
from opdctl.tasks.mapping import SHOWN, Message, read_rows
from opdctl.tasks.mapping import Row as Row
from opdctl.tasks.shards import data_files, sha256
from opdctl.tasks.verifiers import VerifierError, resolve

OURS = ("domain", "effort")  # columns that every row gets


def data_digest(settings: AnyTask, folder: Path, digest: Callable[[Path], str] = sha256) -> dict[str, str]:
    """sha256 of all that the rows and their judgement depend on, but images, by its path relative to `folder`; of a
    folder of shards, those of its files in their order.

    `digest` may remember what it has read. A verifier of the workspace counts as data: another version of it is
    another task.
    """
    if not isinstance(settings, FileTask):
        return {}
    digests = {}
    for path in (settings.path, settings.eval_path):
        if path is not None:
            files = data_files(folder / path)
            digests[path] = " ".join(_read(digest, file) for file in files)
    module, _, function = settings.verifier.partition(":")
    source = module.replace(".", "/") + ".py"
    if function and (folder / source).is_file():
        digests[source] = _read(digest, folder / source)
    return digests


def _read(digest: Callable[[Path], str], path: Path) -> str:
    try:
        return digest(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="paths of data are relative to the workspace") from error


def split_of(row: Row, settings: FileTask) -> Split:
    """Which side a row of `path` is on."""
    held = settings.eval_path is None and is_held_out(row.content, settings.held_out)
    return "eval" if held else "train"


def row_verifier(name: str, settings: FileTask, workspace: Path | None = None) -> Callable[[Prompt, str], Verdict]:
    """`FileRows.verify` of a task, without reading its file."""
    verify_all = rows_verifier(name, settings, workspace)
    return lambda prompt, completion: verify_all([(prompt, completion)])[0]


def rows_verifier(
    name: str, settings: FileTask, workspace: Path | None = None
) -> Callable[[Sequence[tuple[Prompt, str]]], list[Verdict]]:
    """`FileRows.verify_all` of a task, the same. Raises StageFailed where the user's verifier fails."""
    verifier = resolve(settings.verifier, f"tasks.{name}.verifier", workspace or Path.cwd())

    def verify_all(pairs: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        rows: list[Row] = [prompt.answer for prompt, _ in pairs]
        try:
            return verifier([(completion, row.answer) for (_, completion), row in zip(pairs, rows, strict=True)])
        except VerifierError as error:
            row = rows[error.index]
            raise StageFailed(
                f"task {name}: verifier {settings.verifier} failed on row {row.number}, answer {row.answer[:60]!r}: "
                f"{error}",
                hint="a verifier judges any text: have it return False for what it cannot read",
            ) from error

    return verify_all


class FilePrompts:
    """What a task makes of one row of its files, which it does not read. `Prompt.answer` is the Row.

    Relative paths and own verifiers start at the workspace.
    """

    def __init__(
        self, name: str, settings: FileTask, efforts: EffortSettings | None, workspace: Path | None = None
    ) -> None:
        self.name, self.settings, self.efforts = name, settings, efforts
        self.folder = workspace or Path.cwd()
        self._check_settings()
        self.verify_all = rows_verifier(name, settings, workspace)
        self._groups = first_group(name)

    def _check_settings(self) -> None:
        key, settings = f"tasks.{self.name}", self.settings
        problems = [
            f"{key}.{given}: {column!r} is set for every row already"
            for given, columns in (("columns", settings.columns), ("constants", settings.constants))
            for column in columns
            if column in OURS or (given == "constants" and column in settings.columns)
        ]
        named = {settings.prompt, settings.answer, settings.completion, settings.images, *settings.columns}
        problems += [
            f"{key}.values: no key of the task names column {column!r}" for column in settings.values.keys() - named
        ]
        if settings.template == "raw" and settings.system:
            problems.append(f"{key}.system: a system prompt needs template: chat")
        if settings.template == "raw" and self.efforts and self.efforts.by == "system_prompt":
            problems.append(f"{key}.template: raw has no system prompt to ask for an effort by; use template: chat")
        if settings.template == "raw" and settings.images:
            problems.append(f"{key}.images: a model reads images by its chat template; use template: chat")
        if settings.template == "raw" and settings.completion == settings.prompt:
            problems.append(f"{key}.completion: the column of `prompt` holds a conversation; use template: chat")
        if problems:
            raise ConfigError(problems)

    def prompt(self, row: Row, effort: str | None, position: int) -> Prompt:
        """`position`: of the row in its stream, by which it is told from the others of a batch."""
        asked = effort_wording(self.name, self.efforts, effort)
        by_token = self.efforts is not None and self.efforts.by == "control_token"
        text = f"{row.text} {asked}" if asked and by_token else row.text
        messages: list[Message] = []
        if row.messages:
            messages = [*row.messages[:-1], {"role": "user", "content": text}]
            own = messages.pop(0)["content"] if messages[0]["role"] == "system" else self.settings.system
            system = "\n\n".join(part for part in (own, "" if by_token else asked) if part)
            messages = [{"role": "system", "content": system}, *messages] if system else messages
        columns = {**row.columns, "domain": self.name}
        if effort is not None:
            columns["effort"] = effort
        return Prompt(text, row, columns, messages, self._groups + position, self._paths(row))

    def _paths(self, row: Row) -> Sequence[str]:
        """Absolute ones. Raises ConfigError for an image that is not there."""
        paths = [(self.folder / image).absolute() for image in row.images]
        if absent := [path for path in paths if not path.is_file()]:
            raise ConfigError(
                f"tasks.{self.name}: row {row.number}: no image {absent[0]}",
                hint="paths of images are relative to the workspace",
            )
        return [str(path) for path in paths]

    def demonstration(self, row: Row, effort: str | None, position: int) -> Demonstration:
        """The row's completion, or its answer where the file has no completions; it does not depend on the effort."""
        completion = row.answer if row.completion is None else row.completion
        return Demonstration(self.prompt(row, effort, position), completion)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return self.verify_all([(prompt, completion)])[0]

    def reference(self, prompt: Prompt) -> str | None:
        """The answer where the verifier compares with it, else the row's completion, if the file has one."""
        row: Row = prompt.answer
        return row.answer if self.settings.verifier in ("exact", "numeric", "math_verify") else row.completion


class FileRows(FilePrompts):
    """The task of one file, or of a folder of them: its rows in memory, as streams."""

    def __init__(
        self, name: str, settings: FileTask, efforts: EffortSettings | None, workspace: Path | None = None
    ) -> None:
        super().__init__(name, settings, efforts, workspace)
        self._rows = self._load()
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _load(self) -> dict[Split, list[Row]]:
        key, settings = f"tasks.{self.name}", self.settings
        rows = read_rows(self.folder / settings.path, settings, f"{key}.path")
        if settings.eval_path is not None:
            held = read_rows(self.folder / settings.eval_path, settings, f"{key}.eval_path")
            self._refuse_overlap(rows, held)
            return {"train": rows, "eval": held}
        kept: dict[Split, list[Row]] = {"train": [], "eval": []}
        for row in rows:
            kept[split_of(row, settings)].append(row)
        if not kept["train"]:
            raise ConfigError(
                f"{key}.held_out: {settings.held_out} keeps all {len(rows)} rows of {settings.path} for evaluation",
                hint="lower held_out, or give more rows",
            )
        return kept

    def _refuse_overlap(self, rows: Sequence[Row], held: Sequence[Row]) -> None:
        first = {row.content: row.number for row in reversed(rows)}
        shared = [(first[row.content], row.number) for row in held if row.content in first]
        if shared:
            pairs = ", ".join(f"{a} and {b}" for a, b in shared[:SHOWN])
            raise ConfigError(
                f"tasks.{self.name}.eval_path: {len(shared)} of {len(held)} prompts are in `path` too; "
                f"rows of path and eval_path: {pairs}{', ...' if len(shared) > SHOWN else ''}",
                hint="remove them from `path`, or leave eval_path out and let held_out split one file",
            )

    def size(self, split: Split) -> int | None:
        return len(self._rows[split])

    def columns(self, split: Split) -> list[Mapping[str, str]]:
        """The further columns of its rows, each combination once."""
        return list({tuple(row.columns.items()): row.columns for row in self._rows[split]}.values())

    def prompts(self, split: Split, seed: int, start: int, count: int, effort: str | None = None) -> list[Prompt]:
        return [self.prompt(row, effort, start + i) for i, row in enumerate(self._slice(split, seed, start, count))]

    def demonstrations(self, seed: int, start: int, count: int, efforts: Sequence[str] = ()) -> list[Demonstration]:
        return [
            self.demonstration(row, efforts[i % len(efforts)] if efforts else None, i)
            for i, row in enumerate(self._slice("train", seed, start, count), start)
        ]

    def _slice(self, split: Split, seed: int, start: int, count: int) -> list[Row]:
        rows = self._rows[split]
        if split == "train":
            return [rows[self._order(seed, i // len(rows))[i % len(rows)]] for i in range(start, start + count)]
        if start + count > len(rows):
            raise ConfigError(
                f"tasks.{self.name}: {start + count} prompts are wanted for evaluation, and there are {len(rows)}",
                hint="lower rollout.prompts of the eval stage, raise held_out, or give an eval_path",
            )
        return rows[start : start + count]

    def _shuffled(self, seed: int, epoch: int) -> list[int]:
        """The epoch's order: each combination of `columns` comes evenly spaced, so that every batch has its share."""
        import numpy as np

        rows = self._rows["train"]
        rng = np.random.default_rng(np.random.SeedSequence([seed % 2**64, epoch]))
        shuffled = rng.permutation(len(rows))
        numbers: dict[tuple[str, ...], int] = {}
        kinds = np.array([numbers.setdefault(tuple(row.columns.values()), len(numbers)) for row in rows])[shuffled]
        if len(numbers) > 1:
            together = np.argsort(kinds, kind="stable")  # rows of one kind side by side, shuffled as before
            sizes = np.bincount(kinds)
            rank = np.empty(len(rows), np.int64)
            rank[together] = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            # row k of n lies at (k + u) / n of the epoch; u, one for a kind, keeps rare ones from meeting in one place
            place = (rank + rng.random(len(sizes))[kinds]) / sizes[kinds]
            shuffled = shuffled[np.argsort(place, kind="stable")]
        return [int(index) for index in shuffled]

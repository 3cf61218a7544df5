"""Do two models descend from one checkpoint, and are they two at all? Records first; else a sample of the weights.

A student can follow a teacher of its own origin: their distributions start within 0.04 nats a token, and those of
foreign, stronger teachers began at 0.19 and diverged (the thresholds `near` and `far` of the gate, which asks the
models). Origin says so before any model is loaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opdctl.gate.folders import EMBEDDINGS, OUTPUT, Files
from opdctl.gate.pairs import Pair
from opdctl.lineage import began_as
from opdctl.records import Record, read_record
from opdctl.store import Workspace
from opdctl.verdicts import Outcome, Verdict
from opdctl.weight_files import WIDTHS, StoredTensor

if TYPE_CHECKING:
    import numpy as np

SAMPLED = 8  # tensors
VALUES = 65_536  # of each
CHUNK = 1 << 22  # bytes
# Cosine of the weights of two models of one shape; the idea is HuRef's, arXiv:2312.04828. Measured on the packaged
# recipes at laptop scale: 0.998 to 1.000 between offspring of one checkpoint (relative distance up to 0.05), within
# 0.003 of 0 between models initialised apart (1.41).
RELATED = 0.5


def check_origin(pair: Pair, workspace: Path, seed: int, *, alone: bool, idle: bool = False) -> Iterator[Verdict]:
    """`same_model` where one teaches the other or both are merged, and `origin`. Of models that are still to be made,
    only that they are the same one.

    `alone`: the stage has one teacher. A student may be named as one of several teachers (MiMo-V2-Flash,
    arXiv:2601.02780, does so), and a `select` stage may choose it as the best of its domain (Nemotron-Cascade 2,
    arXiv:2603.19220); one that is its only teacher, or stands behind another name, is a mistake. Stages that trained
    and changed nothing are told of where it is not expected: `idle`.
    """
    if not (pair.teaches or pair.merged):
        return
    same = _same(pair)
    if same and pair.teaches and not alone and (pair.one or _selected(pair)):
        told = "the student itself, named as one of its teachers: on its rows it is to stay as it is"
        yield Verdict("same_model", pair.subject, Outcome.GO, told)
    elif same and (start := _unmoved(pair, Workspace(workspace), seed)):
        told = f"{same}: by the records both come from {start}, and nothing was learned since"
        remedy = (
            "" if idle else "see its stages: rewards that never differ, or a learning rate of 0, leave weights alone"
        )
        yield Verdict("same_model", pair.subject, Outcome.GO if idle else Outcome.WARN, told, remedy)
    elif same:
        outcome = Outcome.REFUSE if pair.teaches else Outcome.WARN
        remedy = "name another checkpoint: a model has nothing to teach itself"
        if pair.merged:
            remedy = "name each model once, with the sum of its weights"
        yield Verdict("same_model", pair.subject, outcome, same, remedy)
    if not (pair.first.made and pair.second.made):
        return
    if not same:
        yield Verdict("same_model", pair.subject, Outcome.GO, "two models: their weights differ")
    common = _common(pair, Workspace(workspace), seed)
    if common:
        yield Verdict("origin", pair.subject, Outcome.GO, f"both descend from {common}")
    else:
        yield _by_weights(pair)


# ------------------------------------------------------------------------------------------------------ the same one


def _same(pair: Pair) -> str:
    """Why the two are one model; empty where they are two."""
    if pair.one:
        return f"{pair.first.role} and {pair.second.role} are the same folder, {pair.first.given.path}"
    made = pair.first.made and pair.second.made
    return "the weights of both are equal" if made and _equal(pair.first.files, pair.second.files) else ""


def _equal(first: Files, second: Files) -> bool:
    """Of every tensor, in whatever files it is; read whole only where all samples agree."""
    own, theirs = _untied(first), _untied(second)
    if not own or own.keys() != theirs.keys():
        return False
    if any(_bytes(own[name]) != _bytes(theirs[name]) for name in _chosen(own, theirs)):
        return False
    pairs = [(own[name], theirs[name]) for name in own]
    return all((a.dtype, a.shape) == (b.dtype, b.shape) and _same_bytes(a, b) for a, b in pairs)


def _untied(files: Files) -> Mapping[str, StoredTensor]:
    """Without an output matrix that is the embeddings once more: some folders store it, and some do not."""
    outputs = {name for name in files.tensors if name.endswith(OUTPUT)}
    inputs = [one for name, one in files.tensors.items() if name.endswith(EMBEDDINGS)]
    again = {name for name in outputs if any(_same_bytes(files.tensors[name], one) for one in inputs)}
    return {name: one for name, one in files.tensors.items() if name not in again}


def _same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    if first.size != second.size:
        return False
    with first.file.open("rb") as own, second.file.open("rb") as other:
        own.seek(first.start)
        other.seek(second.start)
        for at in range(0, first.size, CHUNK):
            count = min(CHUNK, first.size - at)
            if own.read(count) != other.read(count):
                return False
    return True


# ------------------------------------------------------------------------------------------------------ by records


def _common(pair: Pair, workspace: Workspace, seed: int) -> str:
    """The youngest model that both began as; empty where the records name none."""
    first, second = _began(pair, workspace, seed)
    return next((title for key, title in first.items() if key in second), "")


def _unmoved(pair: Pair, workspace: Workspace, seed: int) -> str:
    """The checkpoint that, by the records, stages made both from without changing its weights; one may be it itself.
    Empty where there is none, and for a copy, which has the record of its original."""
    own, other = _records(pair)
    if isinstance(own, str) or isinstance(other, str) or own.id == other.id:
        return ""
    mine, theirs = _began(pair, workspace, seed)
    for key, title in mine.items():
        stage = workspace.checkpoint(key) if key in theirs else None
        record = stage.record() if stage else None
        if record and _weights(record) == _weights(own):
            return title
    return ""


def _selected(pair: Pair) -> bool:
    return any(isinstance(record, Record) and record.kind == "select" for record in _records(pair))


def _records(pair: Pair) -> list[Record | str]:
    return [read_record(Path(party.given.path)) for party in (pair.first, pair.second)]


def _began(pair: Pair, workspace: Workspace, seed: int) -> list[dict[str, str]]:
    return [began_as(party.given.path, party.given.source, workspace, seed) for party in (pair.first, pair.second)]


def _weights(record: Record) -> set[str]:
    return {str(listed["sha256"]) for name, listed in record.files.items() if name.endswith(".safetensors")}


# ------------------------------------------------------------------------------------------------------ by weights


@dataclass(frozen=True)
class Nearness:
    """Of two models' weights, means over the sampled tensors."""

    cosine: float
    distance: float  # |a - b| / |a|
    tensors: int


def _by_weights(pair: Pair) -> Verdict:
    found = nearness(pair.first.files, pair.second.files)
    remedy = (
        "what the distance probe finds decides; a teacher made from the student's own checkpoint is the safe choice"
    )
    if pair.merged:
        remedy = "the mean of unrelated weights is no model: merge descendants of one checkpoint"
    if found is None:
        told = "no record joins them, and they have no weights of one name and shape"
        return Verdict("origin", pair.subject, Outcome.WARN, told, remedy)
    values = {"cosine": found.cosine, "distance": found.distance}
    told = f"no record joins them; cosine of weights {found.cosine:.2f}, relative distance {found.distance:.2g}"
    if found.cosine >= RELATED:
        return Verdict("origin", pair.subject, Outcome.GO, f"{told}: one origin", values=values)
    told += f": two origins (below {RELATED:g})"
    return Verdict("origin", pair.subject, Outcome.REFUSE if pair.merged else Outcome.WARN, told, remedy, values)


def nearness(first: Files, second: Files) -> Nearness | None:
    """Compares `VALUES` numbers from the middle of up to `SAMPLED` matrices; embeddings, which frequent words bend in
    every model alike, only where there is nothing else. None without a matrix of one name and shape in both."""
    import numpy as np

    cosines, distances = [], []
    for name in _chosen(first.tensors, second.tensors):
        own, other = _numbers(first.tensors[name]), _numbers(second.tensors[name])
        if own is None or other is None or own.shape != other.shape:
            continue
        norms = float(np.linalg.norm(own)), float(np.linalg.norm(other))
        if not min(norms) > 0:
            continue
        cosines.append(float(own @ other) / (norms[0] * norms[1]))
        distances.append(float(np.linalg.norm(own - other)) / norms[0])
    if not cosines:
        return None
    return Nearness(sum(cosines) / len(cosines), sum(distances) / len(distances), len(cosines))


def _chosen(first: Mapping[str, StoredTensor], second: Mapping[str, StoredTensor]) -> list[str]:
    """Matrices of one shape in both, evenly spread over the names."""
    alike = [name for name, one in first.items() if name in second and len(one.shape) == 2 == len(second[name].shape)]
    alike = sorted(name for name in alike if first[name].shape == second[name].shape)
    inner = [name for name in alike if not name.endswith((OUTPUT, EMBEDDINGS))] or alike
    step = max(1, -(-len(inner) // SAMPLED))
    return inner[step // 2 :: step]


def _bytes(tensor: StoredTensor) -> bytes:
    """From the middle."""
    width = WIDTHS.get(tensor.dtype, 1)
    size = min(tensor.size, VALUES * width)
    with tensor.file.open("rb") as handle:
        handle.seek(tensor.start + (tensor.size - size) // 2 // width * width)
        return handle.read(size)


def _numbers(tensor: StoredTensor) -> "np.ndarray | None":
    """float64; None for dtypes that are not plain numbers."""
    import numpy as np

    raw = _bytes(tensor)
    match tensor.dtype:
        case "F64" | "F32" | "F16":
            return np.frombuffer(raw, f"<f{WIDTHS[tensor.dtype]}").astype(np.float64)
        case "BF16":
            return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return None

"""Merging: the weights of several models of one shape become one model, without any training.

Read, computed and written tensor by tensor, and large tensors in parts: memory does not grow with the models. A merge
takes about as long as copying its inputs, so a stopped one starts anew.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from opdctl.backends.contract import Control, InputSpec, StageResult, StageSpec, Stopped
from opdctl.engine import merge_methods
from opdctl.engine.checkpoint import TIED, load_config, load_vocabulary, save_new_model, save_surroundings
from opdctl.engine.loop import DTYPES, role
from opdctl.engine.merge_methods import Part, Parts
from opdctl.engine.rows import stream_seed
from opdctl.engine.teachers import check_vocabularies
from opdctl.engine.tensors import OpenTensor, TensorWriter, stored_tensors
from opdctl.errors import StageRefused
from opdctl.settings import NewModel
from opdctl.settings.merge import (
    ConvexMerge,
    DareMerge,
    LinearMerge,
    LongcatFusionMerge,
    MergeSettings,
    SceMerge,
    TaskArithmeticMerge,
    TiesMerge,
)
from opdctl.weight_files import some

PART_BYTES = 32 * 2**20  # of the float32 values of all models in one part; a method holds a few times that
# of a config.json: who wrote it and how, not what the network is
_NOT_SHAPE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def run(spec: StageSpec, control: Control) -> StageResult:
    """Merge the models of role `models`, with the one of role `base` where the method has task vectors.

    Configuration, tokenizer and special tokens are those of the base, else of the first model. Raises StageRefused
    unless all models have one shape and one vocabulary.
    """
    settings = MergeSettings.model_validate(spec.config)
    models = [_Source(given, _folder(spec, given)) for given in role(spec, "models")]
    base = next((_Source(given, _folder(spec, given)) for given in role(spec, "base")), None)
    frame, everyone = base or models[0], [*models, *([base] if base else [])]
    _check_same_kind(frame, everyone)
    with ExitStack() as files:
        for source in everyone:
            source.tensors = files.enter_context(stored_tensors(source.folder))
        if load_config(frame.folder).tie_word_embeddings:
            for source in everyone:
                _untie(source)
        _check_same_tensors(frame, everyone)
        merger = _Merger(spec, settings, models, base)
        shapes = {name: tensor.shape for name, tensor in sorted(frame.tensors.items())}
        dtype = DTYPES[settings.precision]
        output = Path(spec.output)
        TensorWriter(output, shapes, dtype).write(_told(control, merger.merged(shapes), len(shapes)))
    save_surroundings(frame.folder, output, dtype)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return StageResult(step=len(everyone), metrics={"models": float(len(models)), "parameters": float(parameters)})


@dataclass
class _Source:
    """A model that is read."""

    given: InputSpec
    folder: Path
    tensors: Mapping[str, OpenTensor] = field(default_factory=dict)  # while its files are open

    def read(self, name: str, start: int, values_C: Tensor) -> Tensor:
        """Fills `values_C`, float32. Raises StageRefused where a value is NaN or infinite."""
        values_C.copy_(self.tensors[name].read(start, len(values_C)))
        # a sum is cheap, and finite unless it overflows or a value is not
        if not math.isfinite(float(values_C.sum())) and not bool(torch.isfinite(values_C).all()):
            raise StageRefused(
                f"{self.given.label}: {name} holds NaN or infinity",
                hint="the training run that wrote it diverged; merge an earlier checkpoint",
            )
        return values_C


def _folder(spec: StageSpec, given: InputSpec) -> Path:
    """A new model is made first, and lies in the state folder."""
    if given.path:
        return Path(given.path)
    folder = Path(spec.state) / "new-model"
    save_new_model(NewModel.model_validate(spec.new_model), spec.seed, folder)
    return folder


def _told(
    control: Control, merged: Iterator[tuple[str, Iterator[Tensor]]], total: int
) -> Iterator[tuple[str, Iterator[Tensor]]]:
    for done, item in enumerate(merged):
        if control.stop_requested():
            raise Stopped
        control.emit(done, total, {}, phase="tensors")
        yield item


class _Merger:
    def __init__(
        self, spec: StageSpec, settings: MergeSettings, models: Sequence[_Source], base: _Source | None
    ) -> None:
        self._seed, self._method, self._models, self._base = spec.seed, settings.merge, models, base
        self._weights_M = torch.tensor([model.given.weight for model in models])
        self._entries = max(1, PART_BYTES // (4 * (len(models) + 1)))

    def merged(self, names: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Iterator[Tensor]]]:
        """(name, parts of the merged tensor)"""
        method = self._method
        norms_M: Tensor | None = None
        if isinstance(method, LongcatFusionMerge) and method.scope == "model":
            sums_M = sum(merge_methods.task_norms(self._parts(name), method.norm) for name in names)
            norms_M = _rooted(torch.as_tensor(sums_M), method)
        for name in names:
            yield name, self._tensor(name, norms_M)

    def _tensor(self, name: str, norms_M: Tensor | None) -> Iterator[Tensor]:
        parts, weights_M = self._parts(name), self._weights_M
        seeds = [stream_seed(self._seed, "merge", name, number) for number in range(len(self._models))]
        match self._method:
            case LinearMerge():
                return merge_methods.linear(parts, weights_M)
            case ConvexMerge():
                return merge_methods.convex(parts, weights_M)
            case TaskArithmeticMerge(scale=scale):
                return merge_methods.task_arithmetic(parts, weights_M, scale)
            case TiesMerge() as given:
                return merge_methods.ties(parts, weights_M, given.density, given.scale)
            case DareMerge() as given:
                return merge_methods.dare(
                    parts, weights_M, given.drop_rate, given.scale, seeds, rescale=given.rescale, sign=given.sign
                )
            case SceMerge(select=select):
                return merge_methods.sce(parts, select)
            case LongcatFusionMerge() as given:
                if norms_M is None:
                    norms_M = _rooted(merge_methods.task_norms(parts, given.norm), given)
                return merge_methods.longcat_fusion(
                    parts,
                    weights_M,
                    norms_M,
                    given.drop_rate,
                    given.scale,
                    seeds,
                    rescale=given.rescale,
                    combine=given.combine,
                )

    def _parts(self, name: str) -> Parts:
        size = self._models[0].tensors[name].size

        def read() -> Iterator[Part]:
            for start in range(0, size, self._entries):
                count = min(self._entries, size - start)
                thetas_MC = torch.empty(len(self._models), count)
                for theta_C, model in zip(thetas_MC, self._models, strict=True):
                    model.read(name, start, theta_C)
                yield Part(thetas_MC, self._base.read(name, start, torch.empty(count)) if self._base else None)

        return Parts(size, read)


def _rooted(sums_M: Tensor, method: LongcatFusionMerge) -> Tensor:
    return sums_M.sqrt() if method.norm == "l2" else sums_M


# --------------------------------------------------------------------------------------------------------- checks


def _check_same_kind(frame: _Source, everyone: Sequence[_Source]) -> None:
    wanted = _shape_of(frame.folder)
    for source in everyone:
        own = _shape_of(source.folder)
        differing = [key for key in sorted(wanted.keys() | own.keys()) if wanted.get(key) != own.get(key)]
        if differing:
            key = differing[0]
            raise StageRefused(
                f"{source.given.label} is another network than {frame.given.label}: {some(differing)} of config.json "
                f"differ; {key} is {own.get(key)!r} and {wanted.get(key)!r}",
                hint="only models of one architecture and shape can be merged",
            )
    tokenizer, _, width = load_vocabulary(frame.folder)
    check_vocabularies(tokenizer, width, [source.given for source in everyone if source is not frame])


def _shape_of(folder: Path) -> dict[str, object]:
    return {key: value for key, value in load_config(folder).to_dict().items() if key not in _NOT_SHAPE}


def _untie(source: _Source) -> None:
    """Some folders of a tied model hold its output matrix as well."""
    rest = {name: tensor for name, tensor in source.tensors.items() if name != TIED}
    tied, embeddings = (
        source.tensors.get(TIED),
        next((rest[n] for n in rest if n.endswith("embed_tokens.weight")), None),
    )
    if tied is None or embeddings is None:
        return
    runs = [(at, min(PART_BYTES // 8, tied.size - at)) for at in range(0, tied.size, PART_BYTES // 8)]
    alike = (tied.shape, tied.dtype) == (embeddings.shape, embeddings.dtype)
    if not alike or not all(torch.equal(tied.read(*run), embeddings.read(*run)) for run in runs):
        raise StageRefused(
            f"{source.given.label}: config.json ties {TIED} to the embeddings, but the weights hold both and they "
            "differ",
            hint="set tie_word_embeddings to false in config.json, if the weights are right",
        )
    source.tensors = rest


def _check_same_tensors(frame: _Source, everyone: Sequence[_Source]) -> None:
    wanted = {name: tensor.shape for name, tensor in frame.tensors.items()}
    for source in everyone:
        own = {name: tensor.shape for name, tensor in source.tensors.items()}
        differing = sorted(name for name in wanted.keys() | own.keys() if wanted.get(name) != own.get(name))
        if differing:
            name = differing[0]
            raise StageRefused(
                f"{source.given.label} has other tensors than {frame.given.label}: {some(differing)}; {name} is "
                f"{_shown(own.get(name))} and {_shown(wanted.get(name))}",
                hint="only models of one architecture and shape can be merged",
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))

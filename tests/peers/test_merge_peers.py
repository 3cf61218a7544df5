"""Our merges against mergekit's, tensor by tensor, where mergekit is installed (written against 0.1.5).

Both merge the same folders. mergekit has no convex interpolation of its own (linear with weights that sum to 1 is one)
and no LongCat fusion; its DARE rescales by the L1 norm, so the entries dropped are made the same and nothing is
rescaled.
"""

from pathlib import Path

import pytest
import torch
from engine.models import tiny_policy
from engine.stages import run, spec_of
from safetensors.torch import load_file

from opdctl.backends.contract import InputSpec
from opdctl.engine.checkpoint import save_policy
from opdctl.engine.merge_methods import Dropout
from opdctl.engine.rows import stream_seed

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]  # the peers' own warnings are not ours
torch.set_num_threads(1)

WEIGHTS = [1.0, 0.5, 0.75]
CASES = {
    "linear": ({"method": "linear"}, "linear", {}),
    "convex": ({"method": "convex"}, "linear", {"normalize": False}),
    "task_arithmetic": (
        {"method": "task_arithmetic", "scale": 0.7},
        "task_arithmetic",
        {"lambda": 0.7, "normalize": False},
    ),
    "ties": (
        {"method": "ties", "density": 0.3, "scale": 0.9},
        "ties",
        {"density": 0.3, "lambda": 0.9, "normalize": True},
    ),
    "ties, all": ({"method": "ties", "density": 1.0, "scale": 1.0}, "ties", {"density": 1.0}),
    "sce": ({"method": "sce", "select": 0.4}, "sce", {"select_topk": 0.4}),
    "sce, all": ({"method": "sce", "select": 1.0}, "sce", {"select_topk": 1.0}),
    "dare": (
        {"method": "dare", "drop_rate": 0.4, "rescale": False, "scale": 0.8},
        "dare_linear",
        {"density": 0.6, "lambda": 0.8, "normalize": False, "rescale": False},
    ),
    "dare, ties": (
        {"method": "dare", "drop_rate": 0.4, "rescale": False, "sign": "ties", "scale": 0.8},
        "dare_ties",
        {"density": 0.6, "lambda": 0.8, "normalize": True, "rescale": False},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("models") / str(seed) for seed in range(4)]
    for seed, folder in enumerate(folders):
        save_policy(*tiny_policy(seed), folder, dtype=torch.float32)
    return folders


@pytest.mark.parametrize("case", CASES)
def test_a_merge_equals_that_of_mergekit_tensor_by_tensor(tmp_path, models, case, monkeypatch):
    pytest.importorskip("mergekit.merge", exc_type=ImportError)
    ours, theirs, parameters = CASES[case]
    base, *merged = models
    weights = [0.5, 0.25, 0.25] if case == "convex" else [1.0] * 3 if ours["method"] == "sce" else WEIGHTS
    inputs = [
        InputSpec("models", str(n), str(m), weight=w) for n, (m, w) in enumerate(zip(merged, weights, strict=True))
    ]
    if ours["method"] not in ("linear", "convex"):
        inputs.append(InputSpec("base", "base", str(base)))
    spec = spec_of(tmp_path / "ours", "merge", {"merge": ours, "precision": "float32"}, inputs)
    run(spec)
    if ours["method"] == "dare":
        same_drops(monkeypatch, base, merged, ours["drop_rate"])
    listed = [
        {"model": str(m)} | ({} if ours["method"] == "sce" else {"parameters": {"weight": w}})
        for m, w in zip(merged, weights, strict=True)
    ]
    config = {"merge_method": theirs, "models": listed, "parameters": parameters, "dtype": "float32"}
    mergekit(tmp_path / "theirs", config | ({"base_model": str(base)} if "base" in {i.role for i in inputs} else {}))
    mine, other = (load_file(Path(folder) / "model.safetensors") for folder in (spec.output, tmp_path / "theirs"))
    other.pop("lm_head.weight", None)  # of a tied model
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(
            mine[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def mergekit(folder, config):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    run_merge(MergeConfiguration.model_validate(config), str(folder), MergeOptions(quiet=True, lazy_unpickle=False))


def same_drops(monkeypatch, base, merged, rate):
    """mergekit draws by torch.bernoulli, without the tensor's name: it is given ours by the values of the tensor."""
    import mergekit.sparsify

    values = load_file(base / "model.safetensors")
    known = []
    for number, folder in enumerate(merged):
        tensors = load_file(folder / "model.safetensors")
        for name, start in values.items():
            delta = tensors[name] - start
            kept = Dropout(rate, [stream_seed(0, "merge", name, number)], rescale=False)(torch.ones(1, delta.numel()))
            known.append((delta, kept.reshape(delta.shape)))

    def drop(tensor, density, rescale_norm=None):
        assert density == 1 - rate
        assert rescale_norm is None
        mask = next(mask for delta, mask in known if delta.shape == tensor.shape and torch.equal(delta, tensor))
        return tensor * mask

    monkeypatch.setattr(mergekit.sparsify, "bernoulli", drop)

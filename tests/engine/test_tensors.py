import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from opdctl.engine.tensors import TensorWriter, stored_tensors
from opdctl.engine.weights import read_weights
from opdctl.errors import OpdctlError

TENSORS = {
    "b": torch.arange(24.0).reshape(4, 6),
    "a": torch.arange(5.0).to(torch.bfloat16),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "empty": torch.empty(0, 3),
}


def write(folder, tensors, dtype, **options):
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    parts = ((name, iter(tensor.float().reshape(-1).split(5))) for name, tensor in tensors.items())
    TensorWriter(folder, shapes, dtype, **options).write(parts)


def test_a_stored_tensor_is_read_in_parts(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with stored_tensors(tmp_path) as stored:
        assert {name: tensor.shape for name, tensor in stored.items()} == {
            n: tuple(t.shape) for n, t in TENSORS.items()
        }
        assert stored["b"].read(5, 4).tolist() == [5.0, 6.0, 7.0, 8.0]
        assert stored["a"].read(0, 5).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert stored["scalar"].read(0, 1).tolist() == [3.0]
        assert stored["empty"].read(0, 0).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_what_safetensors_reads(tmp_path, dtype):
    write(tmp_path, TENSORS, dtype)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor.to(dtype))


def test_more_than_a_shard_is_written_to_several_files_with_an_index(tmp_path):
    write(tmp_path, TENSORS, torch.float32, shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 30
    assert sorted(set(index["weight_map"].values())) == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    read = read_weights(tmp_path)
    assert all(torch.equal(read[name], tensor.float()) for name, tensor in TENSORS.items())


def test_integers_are_refused(tmp_path):
    save_file({"quantised": torch.arange(4)}, tmp_path / "model.safetensors")
    with pytest.raises(OpdctlError, match="quantised is of type I64"), stored_tensors(tmp_path):
        pass


def test_a_value_too_large_for_the_type_is_refused(tmp_path):
    with pytest.raises(OpdctlError, match="a: the result holds NaN or infinity in bfloat16"):
        write(tmp_path, {"a": torch.tensor([3.4e38])}, torch.bfloat16)

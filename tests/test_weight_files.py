import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from opdctl.errors import OpdctlError
from opdctl.weight_files import INDEX, SINGLE, StoredTensor, computable_files, tensors_in, weight_files

TENSORS = {"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "none": torch.empty(0, 4)}


def written(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def one(offsets, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_tensors_are_where_the_header_says(tmp_path):
    file = tmp_path / SINGLE
    save_file(TENSORS, file, metadata={"format": "pt"})
    found = tensors_in(file)
    assert {name: (t.dtype, t.shape, t.size) for name, t in found.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (5,), 10),
        "none": ("F32", (0, 4), 0),
    }
    content = file.read_bytes()
    for name, tensor in found.items():
        assert content[tensor.start :][: tensor.size] == bytes(TENSORS[name].view(torch.uint8).flatten().tolist())


REFUSED = {
    "empty": lambda file: file.write_bytes(b""),
    "seven bytes": lambda file: file.write_bytes(b"1234567"),
    "a header longer than the file": lambda file: file.write_bytes(struct.pack("<Q", 100) + b"{}"),
    "a header longer than any": lambda file: file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
    "no JSON": lambda file: written(file, b"{'a'}"),
    "deep JSON": lambda file: written(file, b"[" * 200_000),
    "no object": lambda file: written(file, [1]),
    "no entry": lambda file: written(file, {"a": 3}),
    "no range": lambda file: written(file, {"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "an endless range": lambda file: written(
        file, b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e999]}}'
    ),
    "bytes missing": lambda file: written(file, {"a": one((0, 8))}, bytes(7)),
    "bytes left over": lambda file: written(file, {"a": one((0, 8))}, bytes(9)),
    "a hole": lambda file: written(file, {"a": one((0, 8)), "b": one((12, 20))}, bytes(20)),
    "an overlap": lambda file: written(file, {"a": one((0, 8)), "b": one((4, 12))}, bytes(12)),
    "a range backwards": lambda file: written(file, {"a": one((8, 0))}, bytes(8)),
    "a shape below zero": lambda file: written(file, {"a": one((0, 8), shape=(-2, -1))}, bytes(8)),
    "a shape of fractions": lambda file: written(file, {"a": one((0, 8), shape=(2.0,))}, bytes(8)),
    "a range of fractions": lambda file: written(file, {"a": one((0.0, 8.0))}, bytes(8)),
    "metadata that is none": lambda file: written(file, {"__metadata__": 5}),
    "metadata of numbers": lambda file: written(file, {"__metadata__": {"format": 5}}),
    "half of a character": lambda file: written(
        file, b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(8)
    ),
    "a shape of another size": lambda file: written(file, {"a": one((0, 8), shape=(3,))}, bytes(8)),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_a_file_that_is_not_whole_is_refused_as_safetensors_refuses_it(tmp_path, damage):
    REFUSED[damage](tmp_path / SINGLE)
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / SINGLE, framework="pt")
    with pytest.raises(OpdctlError, match=r"model\.safetensors: not a whole safetensors file"):
        tensors_in(tmp_path / SINGLE)


@given(cut=st.integers(min_value=0))
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, cut):
    file = tmp_path_factory.getbasetemp() / "cut.safetensors"
    save_file(TENSORS, file)
    content = file.read_bytes()
    file.write_bytes(content[: cut % len(content)])
    with pytest.raises(OpdctlError, match="not a whole"):
        tensors_in(file)


def test_a_single_file_goes_before_an_index(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text("{}")
    assert weight_files(tmp_path) == [tmp_path / SINGLE]


def test_files_of_an_index_are_listed_once_each(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "2.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"b": "2.safetensors", "a": "1.safetensors"}}))
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    assert tensors_in(tmp_path / "2.safetensors")["b"] == StoredTensor(
        tmp_path / "2.safetensors", "BF16", (5,), (tmp_path / "2.safetensors").stat().st_size - 10, 10
    )


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ("{", "not an index of safetensors files"),
        ("[" * 200_000, "not an index of safetensors files"),
        ('{"weight_map": ["a"]}', "not an index of safetensors files"),
        ('{"weight_map": {"a": 3}}', "not an index of safetensors files"),
        ('{"weight_map": {}}', "names no file"),
        ('{"weight_map": {"a": "../1.safetensors"}}', "names files outside the folder: ../1.safetensors"),
        ('{"weight_map": {"a": "2.safetensors"}}', "names files that are not in the folder: 2.safetensors"),
        ('{"weight_map": {"lost": "1.safetensors"}}', "lacks tensors that .* says it holds: lost"),
    ],
)
def test_an_index_that_does_not_hold_is_refused(tmp_path, index, told):
    save_file({"a": TENSORS["a"]}, tmp_path / "1.safetensors")
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(OpdctlError, match=told):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("file", "told", "remedy"),
    [
        ("pytorch_model.bin", r"pickled \(pytorch_model\.bin\).* never unpickles", "save_pretrained"),
        ("adapter_model.safetensors", "no weights", "merge the adapter"),
        ("config.json", "no weights", "Hugging Face format"),
    ],
)
def test_a_folder_without_weights_is_refused_with_what_to_do(tmp_path, file, told, remedy):
    (tmp_path / file).touch()
    with pytest.raises(OpdctlError, match=told) as caught:
        weight_files(tmp_path)
    assert remedy in caught.value.hint


def test_codes_of_quantized_weights_are_refused_and_masks_are_not(tmp_path):
    mask = {"h.attn.bias": torch.ones(1, 1, 2, 2, dtype=torch.uint8), "position_ids": torch.arange(3)}
    save_file({**TENSORS, **mask, "h.bias": torch.ones(2)}, tmp_path / SINGLE)
    computable_files(tmp_path)
    for name, codes in (("h.weight", torch.ones(2, 2)), ("h.qweight", torch.ones(2, 2)), ("h.bias", torch.ones(2))):
        save_file({**TENSORS, name: codes.to(torch.int32)}, tmp_path / SINGLE)
        with pytest.raises(OpdctlError, match=rf"computed with: {name} \(I32\)"):
            computable_files(tmp_path)


def test_a_tensor_in_two_files_of_an_index_is_refused(tmp_path):
    for name in ("1", "2"):
        save_file({"a": torch.full((2,), float(name)), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    listed = {"a": "1.safetensors", "1": "1.safetensors", "2": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(OpdctlError, match="in more than one file: a"):
        weight_files(tmp_path)

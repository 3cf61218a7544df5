import json

import pytest
import torch
from gguf_files import tiny_llama, write_gguf
from transformers import AutoModelForCausalLM

from opdctl.engine.checkpoint import load_policy, load_tokenizer
from opdctl.engine.gguf_import import import_gguf, main
from opdctl.errors import OpdctlError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


@pytest.fixture(scope="module")
def folder(file):
    import_gguf(file, file.parent / "hf")
    return file.parent / "hf"


def test_the_folder_holds_the_model_that_the_file_was_written_from(folder):
    ids = torch.tensor([[5, 9, 12, 30, 7]])
    expected = tiny_llama()(ids).logits
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(loaded(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_padding_is_no_end_of_sequence_although_the_file_says_so(folder):
    tokenizer, policy = load_tokenizer(folder), load_policy(folder)
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert (policy.pad_id, policy.eos_ids) == (0, (2,))


def test_text_becomes_the_tokens_of_the_file(folder):
    assert load_tokenizer(folder)("abcd7<|im_end|>")["input_ids"] == [39, 40, 36, 2]


def test_the_same_file_gives_the_same_folder(file, folder, tmp_path):
    import_gguf(file, tmp_path / "again")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()
    }


def test_an_architecture_that_transformers_cannot_import_is_refused_by_its_name(tmp_path):
    strange = write_gguf(tmp_path / "strange.gguf", tiny_llama(), architecture="rwkv9")
    with pytest.raises(OpdctlError, match="rwkv9") as caught:
        import_gguf(strange, tmp_path / "hf")
    assert "without import" in caught.value.hint


@pytest.mark.parametrize(("keep", "told"), [(3, "not a GGUF file"), (200, "cannot import"), (-4000, "cannot import")])
def test_a_file_that_was_cut_short_is_refused(file, tmp_path, capsys, keep, told):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:keep])
    assert main(str(cut), str(tmp_path / "hf")) == 1
    assert told in json.loads(capsys.readouterr().out)["error"]

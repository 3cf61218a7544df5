"""A GGUF file to a folder in Hugging Face format: `python -m opdctl.engine.gguf_import FILE DIR`.

The weights are written as safetensors in float32, quantised ones as the numbers they stand for. A process of its own,
for it imports transformers and holds the model in memory twice; where it fails it prints {"error", "hint"} and exits
with 1.
"""

import json
import os
import struct
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from opdctl.engine.checkpoint import load_policy
from opdctl.engine.tokenizer import Tokenizer
from opdctl.errors import OpdctlError

MAGIC = b"GGUF"
PADS = (
    "<|endoftext|>",
    "<pad>",
    "[PAD]",
    "<|finetune_right_pad_id|>",
    "<|end_of_text|>",
    "<unk>",
)  # first that is there
_OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version")  # config's keys


def import_gguf(file: Path, folder: Path) -> None:
    """Fill the new folder. Raises OpdctlError for a file that is no whole GGUF, and for a model that transformers has
    no import for, or that the engine cannot train.

    Many files name the end-of-sequence token as padding too, and whoever masks padding would then never train on the
    end of a sequence: such a model gets another padding token of its vocabulary.
    """
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise OpdctlError(f"{file}: not a GGUF file: it does not begin with {MAGIC.decode()}")
    tokenizer, model = _load(file)
    config = type(model.config).from_dict(
        {key: value for key, value in model.config.to_dict().items() if key not in _OF_THE_FILE}
    )
    pad_token = _padding(tokenizer)
    tokenizer.pad_token = pad_token
    config.pad_token_id = tokenizer.convert_tokens_to_ids(pad_token)
    # what was loaded from GGUF counts as quantised and refuses to be saved; its tensors do not
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.generation_config = _generation(tokenizer, config)
    plain.save_pretrained(folder, state_dict=model.state_dict())
    for where in ("is_local", "local_files_only"):  # how it was loaded
        tokenizer.init_kwargs.pop(where, None)
    tokenizer.save_pretrained(folder)
    del model, plain
    load_policy(folder)


def _load(file: Path) -> tuple[Tokenizer, PreTrainedModel]:
    with tempfile.TemporaryDirectory() as alone:  # files beside it would be taken for the model's own
        os.symlink(file.resolve(), Path(alone) / file.name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                alone, gguf_file=file.name, dtype=torch.float32, local_files_only=True
            )
        except ImportError as error:
            raise OpdctlError(f"{file}: {error}", hint="pip install 'opdctl[models]'") from error
        except (OSError, ValueError, KeyError, IndexError, RuntimeError, struct.error) as error:
            raise OpdctlError(
                f"{file}: transformers cannot import it: {error}",
                hint="it is damaged, or of an architecture without import: use the model's safetensors (hf:, path:)",
            ) from error
    return tokenizer, model


def _padding(tokenizer: Tokenizer) -> str:
    """The tokenizer's own unless it ends sequences too; then the first of PADS that does not, if there is one."""
    own, eos = tokenizer.pad_token, tokenizer.eos_token
    if own is not None and own != eos:
        return str(own)
    known = tokenizer.get_vocab()
    return next((token for token in PADS if token in known and token != eos), str(own or eos))


def _generation(tokenizer: Tokenizer, config: PreTrainedConfig) -> GenerationConfig:
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else config.eos_token_id
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else config.bos_token_id
    return GenerationConfig(eos_token_id=eos, bos_token_id=bos, pad_token_id=config.pad_token_id)


def main(file: str, folder: str) -> int:
    logging.set_verbosity_error()
    try:
        import_gguf(Path(file), Path(folder))
    except OpdctlError as error:
        sys.stdout.write(json.dumps({"error": str(error), "hint": error.hint}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

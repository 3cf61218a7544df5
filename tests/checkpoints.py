"""Makes checkpoints and half-trained state as runs leave them, and folders that pass for models."""

import json
import struct
from pathlib import Path

from opdctl.store import Parent, Record, StageDir, write_json


def record(record_id="r1", fingerprint="f", parents=(), **more) -> Record:
    values = {
        "id": record_id,
        "run": "run",
        "stage": "sft",
        "kind": "sft",
        "step": 5,
        "fingerprint": fingerprint,
        "identity": {"seed": 0},
        "parents": [Parent("init", "base", "stage:base", parent) for parent in parents],
        "metrics": {"loss": 0.5},
        "labels": {},
        "created": record_id,
        "opdctl_version": "0",
        "code": "",
        "argv": [],
        "seconds": 1.0,
    }
    return Record(**(values | more))


def output(stage: StageDir, text="weights") -> Path:
    folder = stage.new_attempt().output
    (folder / "model.safetensors").write_text(text)
    (folder / "deep").mkdir()
    (folder / "deep" / "part.json").write_text("{}")
    return folder


def weights(stage: StageDir) -> str:
    return (stage.checkpoint / "model.safetensors").read_text()


def begin(stage, identity, parents=(), step=3, resume=False):
    stage.begin(identity, record(parents=parents).parents, resume=resume)
    write_json(stage.state / "step.json", {"step": step})


def safetensors(*names: str, dtype="U8", width=1, content=b"abcd") -> bytes:
    """A file's content, with four values of each name."""
    size = 4 * width
    entries = {
        name: {"dtype": dtype, "shape": [4], "data_offsets": [size * at, size * at + size]}
        for at, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + content * width * len(names)


def model_folder(folder: Path, content=b"abcd") -> Path:
    """A whole one by its looks, with an empty tokenizer and one tensor of no use."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors("w", content=content))
    return folder

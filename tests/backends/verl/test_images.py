"""Vision-language rows: verl gets the messages and the images, and its model's own template to render them."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import torch
from backends.verl import examples
from engine import stages

from opdctl.backends.verl import data, render
from opdctl.engine.checkpoint import new_policy, save_policy
from opdctl.settings import NewModel

CATS = {
    "task": "file",
    "path": "rows.jsonl",
    "prompt": "question",
    "answer": "result",
    "verifier": "numeric",
    "template": "chat",
    "images": "pictures",
}


def overrides(spec):
    return dict(argument.lstrip("+").split("=", 1) for argument in render.command(spec).argv if "=" in argument)


def test_the_models_own_template_renders_prompts_with_images():
    for kind in ("rlvr", "opd"):
        given = overrides(examples.spec(kind, tasks={"cats": CATS}, config={"data": {"tasks": ["cats"]}}))
        assert given["actor_rollout_ref.model.custom_chat_template"] == "null"
        assert given["data.image_key"] == "images"


def test_rows_hold_messages_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.png").write_bytes(b"")
    words = [f"n{n}" for n in range(100)]
    rows = [{"question": f"{word} <image>", "result": n, "pictures": ["cat.png"]} for n, word in enumerate(words)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = {"words": ["<pad>", "<bos>", "<eos>", "<image>", *words]}
    policy, tokenizer = new_policy(NewModel.model_validate(stages.MODEL | {"tokenizer": tokenizer}), seed=0)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    save_policy(policy, tokenizer, tmp_path / "model", dtype=torch.float32)
    spec = stages.rlvr(tmp_path / "rlvr", tmp_path / "model", data={"tasks": ["cats"], "efforts": []})
    spec = replace(spec, tasks={"cats": CATS}, workspace=str(tmp_path))
    written = pq.read_table(data.write(spec, stages.Recorder()).train).to_pylist()
    assert all(row["prompt"][0]["content"].endswith(" <image>") for row in written)
    assert all(row["images"] == [str(tmp_path / "cat.png")] for row in written)

"""`data show`, `check` and `convert` on files, folders and tasks of a pipeline."""

import json

import pyarrow.parquet as pq
import pytest

ROWS = [{"q": f"w{n % 40} plus w{n // 40}", "a": f"so it is\n#### w{n % 7}", "kind": "xy"[n % 2]} for n in range(120)]
MAPPED = ["--prompt", "q", "--answer", "a", "--completion", "a", "--answer-pattern", "#### (.*)"]
PIPELINE = """
model:
  source: new
  shape: {num_hidden_layers: 1, hidden_size: 8, intermediate_size: 8, num_attention_heads: 1, num_key_value_heads: 1,
    head_dim: 8}
  tokenizer: {words: ["<pad>", "<bos>", "<eos>", plus, so, it, is, "####", WORDS]}
name: mine
seed: 1
tracking: {enabled: false}
tasks:
  own: {path: rows.jsonl, prompt: q, answer: a, completion: a, answer_pattern: "#### (.*)", verifier: exact,
    columns: [kind]}
stages:
  sft:
    kind: sft
    backend: embedded
    inputs: {init: "model:"}
    config:
      data: {tasks: [own]}
      max_tokens: 100
      train: {max_steps: 2, global_batch_size: 4, optimizer: {lr: 0.001}}
  opd:
    kind: opd
    backend: embedded
    inputs: {student: "stage:sft", teachers: [{ref: "stage:sft", label: X, route: {kind: x}}, {ref: "stage:sft",
      label: Y, route: {kind: y}}]}
    config:
      data: {tasks: [own]}
      route_by: [kind]
      loss: {form: policy_gradient, max_advantage: 5.0}
      rollout: {prompts: 8, max_prompt_tokens: 16, max_completion_tokens: 8}
      train: {max_steps: 2, global_batch_size: 8, optimizer: {lr: 0.001}}
""".replace("WORDS", ", ".join(f"w{n}" for n in range(40)))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def rows(workspace):
    write(workspace / "rows.jsonl", ROWS)
    return workspace


@pytest.fixture
def pipeline(rows):
    (rows / "mine.yaml").write_text(PIPELINE)
    return rows


def checked(call, *arguments):
    code, out, _ = call("data", "check", *arguments, "--json")
    return code, json.loads(out)


def test_shown_rows_mark_what_is_trained_on_without_colours(rows, call):
    code, out, _ = call("data", "show", "rows.jsonl", *MAPPED, "--row", "8")
    assert code == 0
    assert "rows.jsonl, row 8" in out
    assert "w7 plus w0\n⟦so it is\n#### w0⟧" in out
    assert "reference 'w0' is right" in out


def test_tokens_are_those_of_the_pipelines_model(pipeline, call):
    code, out, err = call("data", "show", "mine.yaml", "--rows", "1", "--json")
    assert code == 0, err
    prompt, completion = json.loads(out)["rows"][0]["spans"]
    assert (prompt["text"], prompt["tokens"], prompt["trained"]) == ("w0 plus w0", 3, False)
    assert (completion["text"].strip(), completion["tokens"], completion["trained"]) == (
        "so it is #### w0 <eos>",
        6,
        True,
    )


def test_a_file_without_a_mapping_names_its_columns(rows, call):
    code, _, err = call("data", "show", "rows.jsonl")
    assert code == 2
    assert "which column is the prompt? It has: q (text), a (text), kind (text)" in err


def test_a_mapping_may_be_declared_in_yaml(rows, call):
    (rows / "map.yaml").write_text('{prompt: q, answer: a, answer_pattern: "#### (.*)", constants: {source: mine}}')
    code, out, _ = call("data", "show", "rows.jsonl", "--mapping", "map.yaml")
    assert code == 0
    assert "source=mine" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "no such file or folder: none.jsonl"),
        (["rows.jsonl", "a=b", "--prompt", "q"], "overrides belong to a pipeline"),
        (["mine.yaml", "--prompt", "q"], "--prompt: for rows given directly"),
        (["mine.yaml", "--task", "owm"], "did you mean 'own'"),
        (["rows.jsonl", "--prompt", "q"], "needs answer, completion or both"),
        (["rows.jsonl", *MAPPED, "--verifier", "exakt"], "'exakt' is not a verifier; did you mean 'exact'?"),
    ],
)
def test_what_cannot_be_meant_is_refused(pipeline, call, arguments, message):
    code, _, err = call("data", "show", *arguments)
    assert code == 2
    assert message in " ".join(err.split())


def test_good_data_passes_with_its_teachers_interleaved(pipeline, call):
    code, told = checked(call, "mine.yaml")
    assert code == 0, told["findings"]
    assert told["unit"] == "tokens"
    assert told["splits"]["train"]["rows"] + told["splits"]["eval"]["rows"] == 120
    assert told["splits"]["train"]["over"] == {
        "sft config.max_tokens: 100": 0,
        "opd config.rollout.max_prompt_tokens: 16": 0,
        "opd config.rollout.max_completion_tokens: 8": 0,
    }
    [stage] = told["stages"]
    assert [(share["label"], share["fewest_of_batch"] >= 3) for share in stage["shares"]] == [("X", True), ("Y", True)]


def test_a_prompt_that_a_stage_would_refuse_is_found(pipeline, call):
    code, told = checked(call, "mine.yaml", "stages.opd.config.rollout.max_prompt_tokens=2")
    assert code == 1
    assert any(
        "prompts have more than stages.opd.config.rollout.max_prompt_tokens: 2" in f["text"] for f in told["findings"]
    )


def test_a_row_without_a_teacher_is_found(pipeline, call):
    write(pipeline / "rows.jsonl", [*ROWS, *[{"q": f"w{n} w9", "a": "#### w1", "kind": "z"} for n in range(5)]])
    code, told = checked(call, "mine.yaml")
    assert code == 1
    assert any("no teacher for kind=z" in finding["text"] for finding in told["findings"])


def test_bad_rows_are_all_named_and_the_rest_is_looked_at(rows, call):
    write(rows / "rows.jsonl", [*ROWS[:5], {"q": 5, "a": "#### w1"}, {"q": "x"}, *ROWS[5:]])
    code, told = checked(call, "rows.jsonl", *MAPPED)
    assert code == 1
    assert told["splits"]["train"]["bad"] == 2
    assert [f["text"].partition(": ")[0] for f in told["findings"] if f["spoils"]] == [
        str(rows / "rows.jsonl") + ", row 6",
        str(rows / "rows.jsonl") + ", row 7",
    ]


def test_the_report_fits_a_terminal(rows, call):
    code, out, _ = call("data", "check", "rows.jsonl", *MAPPED)
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "█" in out
    assert "nothing found that would spoil a run" in out


@pytest.mark.parametrize("target", ["out.parquet", "out.jsonl"])
def test_conversion_gives_the_rows_that_the_mapping_means(rows, call, target):
    code, out, err = call("data", "convert", "rows.jsonl", target, *MAPPED, "--column", "kind")
    assert code == 0, err
    assert f"{target}: 120 rows, sha256" in out
    made = rows / target
    found = (
        pq.read_table(made).to_pylist()
        if made.suffix == ".parquet"
        else list(map(json.loads, made.read_text().splitlines()))
    )
    assert found[8] == {"prompt": "w8 plus w0", "answer": "w1", "completion": "so it is\n#### w1", "kind": "x"}
    again = [
        "data",
        "check",
        target,
        "--prompt",
        "prompt",
        "--answer",
        "answer",
        "--completion",
        "completion",
        "--json",
    ]
    assert json.loads(call(*again)[1])["splits"]["train"]["rows"] > 90


def test_conversion_without_a_mapping_keeps_rows_as_they_are(rows, call):
    assert call("data", "convert", "rows.jsonl", "raw.parquet")[0] == 0
    assert pq.read_table(rows / "raw.parquet").to_pylist() == ROWS


def test_conversion_overwrites_nothing_and_stops_at_a_bad_row(rows, call):
    code, _, err = call("data", "convert", "rows.jsonl", "rows.jsonl")
    assert (code, "is there already" in err) == (2, True)
    write(rows / "rows.jsonl", [*ROWS, {"q": 5}])
    code, _, err = call("data", "convert", "rows.jsonl", "out.parquet", *MAPPED)
    assert (code, "row 121: no column 'a'" in err) == (2, True)
    assert not list(rows.glob("*out.parquet*"))


def test_a_row_that_is_not_of_this_split_is_an_error(rows, call):
    code, _, err = call("data", "show", "rows.jsonl", *MAPPED, "--row", "8", "--row", "999")
    assert code == 2
    assert "has 1 of these 2 rows" in err


@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet"])
def test_text_that_is_none_is_not_converted(rows, call, tmp_path, target):
    (rows / "odd.jsonl").write_text('{"q": "half \\ud800 of a pair"}\n')
    code, _, err = call("data", "convert", "odd.jsonl", target)
    assert code == 2
    assert "half a surrogate pair" in err
    assert not (rows / target).exists()

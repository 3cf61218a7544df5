"""Secrets are planted wherever one can come from; none is in a file of the workspace, or in what a command prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy
import yaml

from opdctl import secrets
from opdctl.cli import main
from opdctl.cli.app import _keep_traceback
from opdctl.config import load_pipeline
from opdctl.errors import ConfigError
from opdctl.secrets import command_line, conceal, redact, reveal
from opdctl.store import Attempt
from opdctl.supervisor import error_file, tell_failure

# ------------------------------------------------------------------------------------------------- what is secret


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What a test puts into the environment goes with it."""
    monkeypatch.setattr(secrets, "_referred", set())
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.parametrize(
    ("key", "text", "secret"),
    [
        ("tracking.uri", "postgresql://me:pass-word@host:5432/db", "me:pass-word"),
        ("tracking.uri", "https://pass@word@host/x", "pass@word"),
        ("tracking.uri", "https://host/x?user=me&access_token=abc123&page=2", "abc123"),
        ("notify.webhook", "https://example.org/services/T0/B0/xyz", "services/T0/B0/xyz"),
        ("stages.a.config.grader.template", "see hf_abcdefghijklmnopqrstuv.", "hf_abcdefghijklmnopqrstuv"),
        ("scale.note", "Authorization: Bearer abcdefghijklmnop.q", "abcdefghijklmnop.q"),
        ("scale.note", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0"),
        ("scale.note", "AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
        ("scale.wandb.api_key", "anything", "anything"),
        ("scale.db_password", "anything", "anything"),
    ],
)
def test_what_is_written_out_becomes_a_reference_and_comes_back(key, text, secret):
    hidden = conceal(text, key)
    assert secret not in hidden
    assert reveal(hidden) == text
    assert secret not in redact(f"it said: {secret} and {text}")


def test_a_command_keeps_its_flags():
    hidden = conceal({"notify": {"command": ["send", "--token", "a1", "--api-key=b2", "TOKEN=c3", "plain"]}})
    flat = hidden["notify"]["command"]
    assert [part.partition("$")[0] for part in flat] == ["send", "--token", "", "--api-key=", "TOKEN=", "plain"]
    assert reveal(flat) == ["send", "--token", "a1", "--api-key=b2", "TOKEN=c3", "plain"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stages.a.labels.token", "subword"),
        ("stages.a.inputs.init", "hf:org/model@0123abc"),
        ("stages.a.verl.actor.eos_token", "</s>"),
        ("stages.a.config.aggregation", "token"),
        ("tracking.uri", "http://127.0.0.1:5000"),
        ("tracking.uri", "sqlite:////somewhere/mlflow.db"),
        ("stages.a.config.grader.template", "Basic understanding? {completion} a@b.org"),
        ("stages.a.config.grader.endpoint.key_variable", "JUDGE_KEY"),
        ("notify.webhook_token_env", "HOOK_TOKEN"),
        ("scale.lr", 0.1),
        ("seeds", [1, 2]),
    ],
)
def test_what_is_no_secret_stays_as_it_is(key, value):
    assert conceal(value, key) == value


def test_words_near_a_short_secret_are_not_masked(monkeypatch):
    monkeypatch.setenv("OPDCTL_SECRET_X", "abc")
    assert redact("abc, abcd, x=abc; abc_d") == "***, abcd, x=***; ***_d"


def test_a_folder_and_a_flag_in_the_environment_are_no_secrets(monkeypatch):
    monkeypatch.setenv("PWD", "/some/where/else")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-or-so")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent.sock")
    text = "/some/where/else false-or-so /tmp/agent.sock"
    assert redact(text) == text


def test_a_secret_is_masked_in_other_spellings_too(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", 'p"a/s s+word')
    for spelling in ('p"a/s s+word', "p%22a%2Fs%20s%2Bword", "p%22a%2Fs+s%2Bword", 'p\\"a/s s+word'):
        assert redact(f"<{spelling}>") == "<***>"


def test_a_missing_variable_is_named(monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(ConfigError, match="the environment variable NOT_THERE is not set, and is a secret") as caught:
        reveal({"a": ["${secret:NOT_THERE}"]})
    assert "export it" in caught.value.hint


def test_a_missing_variable_of_a_pipeline_is_told_by_its_key_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    (tmp_path / "p.yaml").write_text(json.dumps({"name": "p", "tracking": {"uri": "${secret:NOT_THERE}"}}))
    with pytest.raises(ConfigError) as caught:
        load_pipeline(tmp_path / "p.yaml", workspace=tmp_path)
    [told] = [line for line in caught.value.problems if line.startswith("tracking.uri")]
    start = "tracking.uri: '${secret:NOT_THERE}': the environment variable NOT_THERE is not set (export it in the shell"
    assert told.startswith(start)


def test_an_address_is_shown_but_for_its_secrets(monkeypatch):
    monkeypatch.setenv("MLF_URI", "http://me:pass-word@host.example:5000")
    monkeypatch.setenv("MLF_PW", "pass-word")
    assert secrets.shown("${secret:MLF_URI}") == "${secret:MLF_URI}"
    assert secrets.shown("http://me:${secret:MLF_PW}@host:5000") == "http://me:${secret:MLF_PW}@host:5000"
    assert secrets.shown(conceal("http://me:other-word@host:5000", "tracking.uri")) == "http://***@host:5000"
    assert secrets.shown("http://host:5000/?token=abcdefgh") == "http://host:5000/?token=***"


def test_arguments_are_masked_by_key_by_shape_and_by_value(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "value-of-a-token")
    given = ["run", "p", "scale.api_key=xyz", "tracking.uri=http://u:pw@h", "a=value-of-a-token", "b.api_key=${c}"]
    assert command_line(given) == ["run", "p", "scale.api_key=***", "tracking.uri=http://***@h", "a=***", given[-1]]


def test_an_identity_does_not_depend_on_the_secret(tmp_path):
    def fingerprint_of(password):
        stage = toy.sft() | {"labels": {"note": f"http://u:{password}@h"}}
        return toy.pipeline({"sft": stage}, folder=tmp_path).resolved

    assert fingerprint_of("one-password") == fingerprint_of("another-one")


def test_verl_gets_no_secret_for_it_would_log_it(tmp_path):
    with pytest.raises(ConfigError, match=r"stages\.sft\.verl: has a secret in it") as caught:
        toy.pipeline({"sft": toy.sft(verl={"trainer": {"api_key": "planted"}})}, folder=tmp_path)
    assert "planted" not in str(caught.value)


def test_a_told_failure_and_the_report_of_a_bug_are_masked(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "value-of-a-token")
    monkeypatch.setattr(sys, "argv", ["opdctl", "run", "scale.api_key=xyz"])
    attempt = Attempt(1, tmp_path)
    tell_failure(attempt, "401 with value-of-a-token", "not http://u:pw@h")
    assert json.loads(error_file(attempt).read_text()) == {"message": "401 with ***", "hint": "not http://***@h"}
    (tmp_path / "runs").mkdir()
    told = _keep_traceback(tmp_path, "ValueError: value-of-a-token").read_text()
    assert "scale.api_key=***" in told
    assert "ValueError: ***" in told


# --------------------------------------------------------------------------------------------- through a real run

PLANTED = {
    "HF_TOKEN": "planted-hub-token",
    "STORE": "sqlite:///{outside}/planted-store/mlflow.db",
    "HOOK_AUTH": "planted-bearer",
    "HOOK_TOKEN": "planted-path",
    "JUDGE_URL_KEY": "http://127.0.0.1:9/planted-judge/v1",
    "JUDGE_KEY": "planted-judge-key",
    "SOME_NAME": "planted-by-mark",
}
OVERRIDES = ["+scale.api_key=planted-argument", "tracking.experiment=at-https://me:planted-pass@host/x"]
SFT = {
    "kind": "sft",
    "backend": "embedded",
    "inputs": {"init": "model:"},
    "labels": {"note": "${secret:SOME_NAME}", "mirror": "https://planted-user@host/"},
    "config": {
        "data": {"tasks": ["general"], "efforts": ["low"]},
        "max_tokens": 128,
        "train": {"max_steps": 2, "global_batch_size": 2, "optimizer": {"lr": 0.01}},
    },
}
GRADER = {
    "tasks": ["general"],
    "mode": "rubric",
    "by": "endpoint",
    "template": "{prompt} {completion}: good? (ask sk-planted0123456789abcdef)",
    "verdicts": {"yes": 1.0, "no": 0.0},
    "max_tokens": 4,
    "endpoint": {"url": "${oc.env:JUDGE_URL_KEY}", "model": "judge", "key_variable": "JUDGE_KEY", "attempts": 1},
}
PIPELINE = {
    "defaults": [{"/model": "tiny_qwen3_h32"}, {"/task": "kimi_k3_chains"}, "_self_"],
    "name": "planted",
    "tracking": {"uri": "${secret:STORE}"},
    "notify": {
        "webhook": "http://127.0.0.1:9/${oc.env:HOOK_TOKEN}",
        "webhook_token_env": "HOOK_AUTH",
        "command": ["sh", "-c", "echo $HOOK_AUTH $1 $2 >&2; exit 7", "--token", "planted-flag"],
    },
    "retry": {"attempts": 0},
    "gate": {"models": False},
}


def planted_in(content: bytes) -> list[str]:
    words = (b"planted-", b"sk-planted")
    return [content[max(0, at - 40) : at + 40].decode(errors="replace") for w in words if (at := content.find(w)) >= 0]


@pytest.fixture
def planted(workspace, tmp_path, monkeypatch):
    """A workspace with a pipeline full of secrets, and where its MLflow store is."""
    outside = tmp_path / "outside"
    (outside / "planted-store").mkdir(parents=True)
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value.format(outside=outside))
    rollout = {"prompts": 2, "max_prompt_tokens": 96, "max_completion_tokens": 8}
    judged = {"data": SFT["config"]["data"], "rollout": rollout, "grader": GRADER}
    evaluation = {"kind": "eval", "backend": "embedded", "inputs": {"models": ["stage:sft"]}, "config": judged}
    tree = PIPELINE | {"stages": {"sft": SFT, "eval": evaluation}}
    (workspace / "planted.yaml").write_text(yaml.safe_dump(tree))
    return outside


def test_no_secret_is_in_the_workspace_in_mlflow_or_in_what_is_printed(planted, workspace, tmp_path, capfd):
    command = [sys.executable, "-m", "opdctl", "run", "planted.yaml", *OVERRIDES, "--run", "r"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert "Traceback" not in told
    assert "sft: done" in told
    assert "eval failed" in told  # nobody answers as its judge: what that says is looked at too
    assert "notify.webhook: could not be sent" in told
    assert "notify.command: ended with exit code 7" in told
    printed = {"run": told}
    for words in (["plan", "planted.yaml", *OVERRIDES], ["plan", "planted.yaml", *OVERRIDES, "--json"]):
        printed[" ".join(words[::2])] = called(capfd, *words, "--run", "r")
    for words in (["status", "r"], ["status", "r", "--json"], ["runs", "--json"], ["lineage", "sft", "--run", "r"]):
        printed[" ".join(words)] = called(capfd, *words)
    printed["report"] = called(capfd, "report", "r", "--out", "page.html")
    assert (workspace / "page.html").exists()
    files = [path for folder in (workspace, planted) for path in folder.rglob("*") if path.is_file()]
    written = {str(path): path.read_bytes() for path in files}
    own = str(workspace / "planted.yaml")  # the user's
    assert own in written
    names = {Path(path).name for path in written}
    assert {"spec.json", "record.json", "run.json", "pipeline.yaml", "mlflow.db", ".lock", "error.json"} <= names
    leaks = {name: found for name, content in written.items() if name != own and (found := planted_in(content))}
    leaks |= {name: found for name, text in printed.items() if (found := planted_in(text.encode()))}
    assert leaks == {}
    kept = json.loads((workspace / "runs/r/pipeline.yaml").read_text())
    assert kept["tracking"]["uri"] == "${secret:STORE}"
    assert kept["notify"]["webhook"] == "http://127.0.0.1:9/${secret:HOOK_TOKEN}"
    database = (planted / "planted-store" / "mlflow.db").read_bytes()
    assert b"at-https://${secret:" in database  # it was tracked there, and under a name without the password


def called(capfd, *words: str) -> str:
    with pytest.raises(SystemExit):
        main(list(words))
    return "".join(capfd.readouterr())


def test_a_secret_of_the_environment_may_be_anywhere_in_a_text(planted, workspace, monkeypatch):
    monkeypatch.setenv("HOOK_TOKEN", "first")
    assert reveal(load_pipeline("planted.yaml").settings.notify.webhook) == "http://127.0.0.1:9/first"


@pytest.mark.parametrize("mark", ["secret", "oc.env"])
def test_a_variable_that_is_not_set_is_refused_at_once_by_its_key(planted, monkeypatch, capfd, mark):
    monkeypatch.delenv("HOOK_AUTH")
    told = called(capfd, "plan", "planted.yaml", f"tracking.uri=${{{mark}:HOOK_AUTH}}")
    assert "tracking.uri: " in told
    assert "HOOK_AUTH" in told

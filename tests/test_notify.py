"""Real commands and a real server: what they are told, and that neither can hold a run up."""

import http.server
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from opdctl.notify import Notifier
from opdctl.settings import Notify

CONTEXT = {"pipeline": "p", "run": "r"}
WRITES = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"


def notifier(**given) -> Notifier:
    return Notifier(Notify.model_validate({"timeout_s": 5.0} | given), CONTEXT)


@pytest.fixture
def server():
    """Answers as `server.answer` says, (status, headers); `server.got` is what it was sent."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.path, dict(self.headers), json.loads(body)))
            self.server.waits.wait(self.server.delay)
            status, headers = self.server.answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *args):
            return None

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.got, found.answer, found.delay, found.waits = [], (200, {}), 0.0, threading.Event()
    found.url = f"http://127.0.0.1:{found.server_port}"
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield found
    found.waits.set()
    found.shutdown()
    found.server_close()


def test_a_command_gets_each_event_as_json_in_order(tmp_path):
    told = notifier(command=[sys.executable, "-c", WRITES, str(tmp_path / "told")])
    told.tell("failed", "sft", "it broke")
    told.tell("finished", "", "1 failed")
    assert told.close() == []
    first, last = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert first | {"time": ""} == {"event": "failed", "stage": "sft", "message": "it broke", "time": ""} | CONTEXT
    assert (last["event"], last["stage"]) == ("finished", "")


def test_a_webhook_gets_the_same_with_its_token(server, monkeypatch):
    monkeypatch.setenv("HOOK_TOKEN", "tok-123456789")
    told = notifier(webhook=f"{server.url}/hook", webhook_token_env="HOOK_TOKEN")
    told.tell("refused", "opd", "another vocabulary")
    assert told.close() == []
    [(path, headers, document)] = server.got
    assert (path, headers["Authorization"], headers["Content-Type"]) == (
        "/hook",
        "Bearer tok-123456789",
        "application/json",
    )
    assert document["message"] == "another vocabulary"


def test_only_what_was_asked_for_is_told(tmp_path):
    told = notifier(command=[sys.executable, "-c", WRITES, str(tmp_path / "told")], events=["failed"])
    told.tell("finished", "", "done")
    assert told.close() == []
    assert not (tmp_path / "told").exists()


def test_a_message_is_redacted_and_the_commands_output_goes_nowhere(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SOME_TOKEN", "very-secret-value")
    code = WRITES + "; import os; print(os.environ['SOME_TOKEN']); sys.exit(os.environ['SOME_TOKEN'])"
    told = notifier(command=[sys.executable, "-c", code, str(tmp_path / "told")])
    told.tell("failed", "sft", "401 for very-secret-value")
    assert told.close() == ["notify.command: ended with exit code 1"]
    assert "very-secret-value" not in (tmp_path / "told").read_text()
    assert capfd.readouterr() == ("", "")


def test_secrets_of_the_settings_reach_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("HOOK_KEY", "k-123456789")
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    told = notifier(command=[sys.executable, "-c", code, str(tmp_path / "told"), "${secret:HOOK_KEY}"])
    told.tell("failed", "sft", "")
    assert told.close() == []
    assert (tmp_path / "told").read_text() == "k-123456789"


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_hanging_command_is_killed_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    told = notifier(command=["sh", "-c", f"sleep 600 & echo $$ $! > {pids}; wait"], timeout_s=1.5)
    told.tell("failed", "sft", "")
    assert told.close() == ["notify.command: did not end within 1.5 s (notify.timeout_s) and was killed"]
    deadline = time.monotonic() + 10
    while any(map(lives, map(int, pids.read_text().split()))):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_silent_server_holds_nobody_up(server):
    server.delay = 60.0
    told = notifier(webhook=server.url, timeout_s=0.3)
    began = time.monotonic()
    told.tell("failed", "sft", "")
    [complaint] = told.close()
    assert time.monotonic() - began < 30
    assert complaint.startswith("notify.webhook: could not be sent: ")


@pytest.mark.parametrize("status", [302, 307, 404, 500])
def test_an_answer_that_is_no_success_is_told_and_no_redirect_followed(server, monkeypatch, status):
    monkeypatch.setenv("HOOK_TOKEN", "tok-123456789")
    server.answer = status, {"Location": f"{server.url}/elsewhere"}
    told = notifier(webhook=server.url, webhook_token_env="HOOK_TOKEN")
    told.tell("failed", "sft", "")
    assert told.close() == [f"notify.webhook: the server answered {status}"]
    assert len(server.got) == 1


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"command": ["/nowhere/at/all"]}, "notify.command: could not be started: "),
        ({"webhook": "http://127.0.0.1:9/"}, "notify.webhook: could not be sent: URLError"),
        (
            {"webhook": "http://127.0.0.1:9/", "webhook_token_env": "NOT_SET_AT_ALL"},
            "notify.webhook: the environment v",
        ),
        ({"command": ["echo", "${secret:NOT_SET_AT_ALL}"]}, "notify.command: could not be started: the environment v"),
    ],
)
def test_what_cannot_be_sent_is_a_complaint(given, complaint):
    told = notifier(**given)
    told.tell("failed", "sft", "")
    [found] = told.close()
    assert found.startswith(complaint)


@pytest.mark.parametrize("timeout_s", [0.5, 60.0])
def test_a_command_is_not_left_behind_when_the_time_is_up_or_given_up(tmp_path, timeout_s):
    pids = tmp_path / "pids"
    told = notifier(command=["sh", "-c", f"trap '' TERM; echo $$ >> {pids}; sleep 60"], timeout_s=timeout_s)
    for _ in range(9):
        told.tell("failed", "sft", "")
    given_up = timeout_s > 1.0
    said = told.close(give_up=lambda: given_up and pids.exists() and pids.stat().st_size > 0)
    assert "of 9 messages were not sent in time" in said[-1]
    told._thread.join(5.0)
    assert not told._thread.is_alive()
    assert not [pid for pid in pids.read_text().split() if Path(f"/proc/{pid}").exists()]


def test_who_asks_for_nothing_starts_nothing():
    told = notifier()
    told.tell("failed", "sft", "")
    assert not told._thread.is_alive()
    assert told.close() == []

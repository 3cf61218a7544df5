"""Why a tracking server takes nothing, as the user is told it."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import toy

from opdctl import runner
from opdctl.repair import repair
from opdctl.store import Workspace
from opdctl.tracking.server import Unreachable, asking, connect

# MLflow's own use of its libraries is not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (401, "it refuses the user or the password (401)"),
        (403, "the user may not do this there (403): see user and password"),
        (404, "nothing is at this address (404): is it an MLflow server?"),
        (None, "the connection is refused: nothing listens at this host and port"),
    ],
)
def test_why_a_server_takes_nothing_is_one_sentence_told_once_and_without_what_is_secret(
    workspace, monkeypatch, code, why
):
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(code)
            self.end_headers()

        def log_message(self, *of):
            return None

    monkeypatch.setattr(runner, "DRAIN_S", 30.0)
    with HTTPServer(("127.0.0.1", 0), Refusing) as listening:
        monkeypatch.setenv("MLF_URI", f"http://me:pass-word@127.0.0.1:{listening.server_port}")
        if code is None:
            listening.server_close()
        else:
            threading.Thread(target=listening.serve_forever, daemon=True).start()
        notes = toy.Notes()
        toy.run(
            toy.pipeline({"sft": toy.sft()}, tracking={"enabled": True, "uri": "${secret:MLF_URI}"}), reporter=notes
        )
        if code is not None:
            listening.shutdown()
    place = Workspace(workspace)
    told = [text for (text,) in notes.of("message") if "MLflow" in text]
    assert told[0] == (
        f"tracking: MLflow at ${{secret:MLF_URI}} does not answer as it should ({why}); training goes on, and what is "
        "missing there is told later"
    )
    assert told[-1].startswith("not yet in MLflow at ${secret:MLF_URI}: ")
    assert (sum(why in text for text in told), "(why: see above)" in told[-1]) == (1, True)
    assert "127.0.0.1" not in "".join(told)
    assert "nothing listens" in next(repair(place, [place.run("r")])).told  # by now nobody does


def test_an_address_without_a_scheme_is_told_so(workspace):
    with pytest.raises(Unreachable, match="no scheme that MLflow knows, such as http://"), asking():
        connect("host:5000", None).get_experiment_by_name("x")

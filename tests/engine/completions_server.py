"""A server on this machine that answers as OpenAI's completions API does, or as a broken one."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: str) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"text": text, "message": {"content": text}}]}).encode()


@contextmanager
def serving(answer: Callable[..., Any]) -> Iterator[tuple[str, list[Any]]]:
    """A server whose `answer(path, payload, number of the request)` gives status, body and headers.

    Yields its url, and the list of what it was asked: path, payload, headers.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, payload, dict(self.headers)))
            status, body, *headers = answer(self.path, payload, len(asked))
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # a client that gave up is no news
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A server that speaks as much of the Hugging Face hub's API as downloading a model takes."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]]  # commit -> file -> content
    branches: dict[str, str]
    gated: bool = False


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # paths of all requests
    url: str = ""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlparse(self.path).path)
            hub.asked.append(path)
            status, headers, body = _answer(hub, path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *of) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(hub: Hub, path: str) -> tuple[int, dict[str, str], bytes]:
    api = path.startswith("/api/models/")
    name = "/".join(path.removeprefix("/api/models/").lstrip("/").split("/")[:2])
    rest = path.split(name, 1)[1].lstrip("/").split("/")
    repository = hub.repositories.get(name)
    if repository is None:
        return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"{}"
    commit = repository.branches.get(rest[1], rest[1])
    files = repository.commits.get(commit)
    if files is None:
        return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {rest[1]}"}, b"{}"
    if api and rest[0] == "revision":
        return _json({"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]})
    if api and rest[0] == "tree":
        return _json([{"type": "file", "path": f, "size": len(c), "oid": _etag(c)} for f, c in files.items()])
    if repository.gated:
        return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b"{}"
    content = files["/".join(rest[2:])]
    return 200, {"X-Repo-Commit": commit, "ETag": f'"{_etag(content)}"'}, content


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

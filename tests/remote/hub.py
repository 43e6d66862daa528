"""A hub on 127.0.0.1: the few endpoints that `huggingface_hub` needs to look up and download models.

It serves directories as they are, as repositories of one commit each, and notes every request.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Request:
    """One request: method, path below the endpoint, and the bearer token that came with it."""

    method: str
    path: str
    token: str | None


@dataclass
class Hub:
    """Repositories by id; `branches` names the commit of `main` and of others, `commits` its files."""

    endpoint: str = ""
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, Path] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    token: str | None = None

    def publish(self, repo: str, directory: Path, branch: str = "main") -> str:
        """Serve `directory` as the newest commit of a branch; returns the commit."""
        commit = hashlib.sha1(f"{repo} {directory} {len(self.commits)}".encode()).hexdigest()
        self.branches.setdefault(repo, {})[branch] = commit
        self.commits[commit] = directory
        return commit

    def fetched(self, token: str | None = None) -> set[str]:
        """Names of the files of which content was sent, to the holder of `token` if one is given."""
        return {
            request.path.split("/resolve/")[1].partition("/")[2]
            for request in self.requests
            if request.method == "GET" and "/resolve/" in request.path
            if token is None or request.token == token
        }


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests look at `requests`."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.served.requests.append(Request(self.command, path, token))
        if self.served.token is not None and token != self.served.token:
            self._error(401, "GatedRepo")
        elif path.startswith("/api/models/"):
            owner, name, *rest = path.removeprefix("/api/models/").split("/")
            what = rest[0] if rest else "revision"
            self._api(f"{owner}/{name}", what, rest[1] if len(rest) > 1 else "main")
        elif "/resolve/" in path:
            repo, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            self._file(repo, revision, name)
        else:
            self._error(404, "RepoNotFound")

    def _commit(self, repo: str, revision: str) -> str | None:
        branches = self.served.branches.get(repo)
        if branches is None:
            self._error(404, "RepoNotFound")
            return None
        commit = branches.get(revision, revision)
        if commit not in self.served.commits:
            self._error(404, "RevisionNotFound")
            return None
        return commit

    def _api(self, repo: str, what: str, revision: str) -> None:
        commit = self._commit(repo, revision)
        if commit is None:
            return
        directory = self.served.commits[commit]
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        names = [path.relative_to(directory).as_posix() for path in paths]
        if what == "tree":
            self._json(
                [
                    {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
                    for name, path in zip(names, paths, strict=True)
                ]
            )
        else:
            siblings = [{"rfilename": name} for name in names]
            self._json({"id": repo, "sha": commit, "private": False, "siblings": siblings})

    def _file(self, repo: str, revision: str, name: str) -> None:
        commit = self._commit(repo, revision)
        if commit is None:
            return
        path = self.served.commits[commit] / name
        if not path.is_file():
            self._error(404, "EntryNotFound", commit)
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, code: str, commit: str | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()

"""A small Hugging Face hub on 127.0.0.1: one repository, a folder a commit.

Speaks what huggingface_hub asks for a model: its description, its tree, paths of it, and files by
HEAD and GET, in ranges too. It counts what it is asked, and can break off or lie when told to.
"""

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "org/tiny"
MAIN = "1" * 40


def nothing(_: str) -> None:
    """What the server does before it sends a file, unless told otherwise."""


@dataclass
class HubServer:
    """`folders` by commit. `whole` lists the files sent whole, in order, `n_requests` counts all.

    `sha256` are statements that differ from the truth; a file in `broken` is sent by half, and
    then the connection is reset.
    """

    folders: dict[str, Path]
    branches: dict[str, str] = field(default_factory=lambda: {"main": MAIN})
    sha256: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    whole: list[str] = field(default_factory=list)
    n_requests: int = 0
    before_file: Callable[[str], None] = nothing
    endpoint: str = ""

    def commit(self, revision: str) -> str | None:
        """The commit of a branch or commit; None when there is none."""
        commit = self.branches.get(revision, revision)
        return commit if commit in self.folders else None

    def entries(self, commit: str) -> list[dict[str, Any]]:
        """All files of a commit, as in a tree; weights are in LFS."""
        found = []
        for path in sorted(self.folders[commit].iterdir()):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            size = path.stat().st_size
            entry: dict[str, Any] = {"type": "file", "path": path.name, "size": size}
            entry["oid"] = digest[:40]
            if path.suffix == ".safetensors":
                stated = self.sha256.get(path.name, digest)
                entry["lfs"] = {"oid": stated, "size": size, "pointerSize": 130}
            found.append(entry)
        return found


@contextmanager
def serving(server: HubServer) -> Iterator[HubServer]:
    """The server, its `endpoint` set, answering until the block ends."""

    class Handler(HubHandler):
        hub = server

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


class HubHandler(BaseHTTPRequestHandler):
    """Answers requests for the repository of `hub`."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        """Descriptions, trees and files."""
        self._answer()

    def do_HEAD(self) -> None:
        """Files."""
        self._answer()

    def do_POST(self) -> None:
        """The paths of a commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self._answer(body)

    def _answer(self, body: str = "") -> None:
        self.hub.n_requests += 1
        path = unquote(urlsplit(self.path).path)
        api, files = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/"
        if path.startswith(files):
            revision, _, name = path[len(files) :].partition("/")
            self._send_file(revision, name)
            return
        if path != api and not path.startswith(f"{api}/"):
            self._refuse("RepoNotFound", "Repository not found")
            return
        what, _, revision = path[len(api) :].strip("/").partition("/")
        revision = revision.split("/")[0] or "main"
        if (commit := self.hub.commit(revision)) is None:
            self._refuse("RevisionNotFound", f"Invalid rev id: {revision}")
            return
        entries = self.hub.entries(commit)
        if what == "tree":
            self._send_json(entries)
        elif what == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            self._send_json([entry for entry in entries if entry["path"] in wanted])
        else:
            self._send_json(_description(commit, entries))

    def _refuse(self, code: str, message: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_file(self, revision: str, name: str) -> None:
        commit = self.hub.commit(revision)
        if commit is None or not (self.hub.folders[commit] / name).is_file():
            self._refuse("EntryNotFound" if commit else "RevisionNotFound", f"no {name}")
            return
        data = (self.hub.folders[commit] / name).read_bytes()
        start, end = 0, len(data)
        byte_range = self.headers.get("Range")
        if byte_range is not None:
            first, _, last = byte_range.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1 if last else end, end)
        entry = next(e for e in self.hub.entries(commit) if e["path"] == name)
        self.send_response(200 if byte_range is None else 206)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{entry["oid"]}"')
        if "lfs" in entry:
            self.send_header("X-Linked-ETag", f'"{entry["lfs"]["oid"]}"')
            self.send_header("X-Linked-Size", str(len(data)))
        if byte_range is not None:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        if byte_range is None:
            self.hub.whole.append(name)
            self.hub.before_file(name)
            if name in self.hub.broken:
                self.wfile.write(data[: len(data) // 2])
                self._reset()
                return
        self.wfile.write(data[start:end])

    def _reset(self) -> None:
        """Close so that the client's next read fails at once."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True


def _description(commit: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    siblings = []
    for entry in entries:
        sibling = {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
        if "lfs" in entry:
            lfs = entry["lfs"]
            sibling["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": 130}
        siblings.append(sibling)
    return {
        "_id": "0" * 24,
        "id": REPOSITORY,
        "modelId": REPOSITORY,
        "sha": commit,
        "private": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": siblings,
    }

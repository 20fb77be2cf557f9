"""A local stand-in of the Hugging Face Hub: its HTTP API as huggingface_hub uses it, with repositories in memory.

Files with the suffix of `lfs` go to LFS storage, as the Hub's .gitattributes says; others are in the commit. A commit
is named by what it holds. A private repository is one that is missing to whoever sends another token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

TOKEN = "hf_writer"
LFS = ".safetensors"


@dataclass
class Repository:
    """commits: the files of each, by name; refs: branches and tags."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit({".gitattributes": f"*{LFS} filter=lfs\n".encode()}, "initial commit")

    @property
    def files(self) -> dict[str, bytes]:
        """Those of the newest commit."""
        return self.commits[self.refs["main"]]

    def commit(self, files: dict[str, bytes], title: str) -> str:
        content = repr((sorted((n, hashlib.sha1(d).hexdigest()) for n, d in files.items()), title, len(self.commits)))
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha], self.refs["main"] = files, sha
        return sha


class Hub(ThreadingHTTPServer):
    """repositories: by id. storage: of LFS, by sha256. requests: method and path of each request, in order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def handle_any(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "validate-yaml"]:
            return self.answer(200, {"warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
        if parts[:3] == ["api", "repos", "create"]:
            return self.create(json.loads(body))
        if parts[0] == "lfs":
            self.server.storage[parts[1]] = body
            return self.answer(200)
        if parts[0] == "api":
            name, rest = "/".join(parts[2:4]), parts[4:]
        else:
            name, rest = "/".join(parts[:2]).removesuffix(".git"), parts[2:]
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not self.is_writer):
            return self.refuse(401 if not self.is_writer else 404, "RepoNotFound")
        if repository.gated:
            return self.refuse(403, "GatedRepo")
        if self.command in ("POST", "PUT") and not self.is_writer:
            return self.refuse(403, "Forbidden")
        return self.of_repository(name, repository, rest, body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    @property
    def is_writer(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def create(self, wanted: dict) -> None:
        if not self.is_writer:
            return self.refuse(401, "Unauthorized")
        name = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.server.url}/{name}"}
        if name in self.server.repositories:
            return self.answer(409, url)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"  # of older and newer clients
        self.server.repositories[name] = Repository(private=private)
        return self.answer(200, url)

    def of_repository(self, name: str, repository: Repository, rest: list[str], body: bytes) -> None:
        match rest:
            case ["info", "lfs", "objects", "batch"]:
                objects = json.loads(body)["objects"]
                links = [{"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}} for one in objects]
                found = [{**one, "actions": link} for one, link in zip(objects, links, strict=True)]
                return self.answer(200, {"transfer": "basic", "objects": found})
            case ["preupload", _]:
                modes = {f["path"]: "lfs" if f["path"].endswith(LFS) else "regular" for f in json.loads(body)["files"]}
                files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
                return self.answer(200, {"files": files})
            case ["commit", "main"]:
                return self.commit(name, repository, [json.loads(line) for line in body.splitlines()])
            case [] | ["revision" | "tree" | "resolve", *_]:
                return self.read(name, repository, rest)
        return self.refuse(404, "EntryNotFound")

    def commit(self, name: str, repository: Repository, lines: list[dict]) -> None:
        files, header = dict(repository.files), {}
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    header = value
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.storage[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        if header.get("parentCommit") not in (None, repository.refs["main"]):
            return self.refuse(412, "PreconditionFailed")
        sha = repository.commit(files, header["summary"])
        return self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})

    def read(self, name: str, repository: Repository, rest: list[str]) -> None:
        revision = rest[1] if rest else "main"
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            return self.refuse(404, "RevisionNotFound")
        files = repository.commits[sha]
        if rest[:1] == ["resolve"]:
            data = files.get(file := "/".join(rest[2:]))
            if data is None:
                return self.refuse(404, "EntryNotFound")
            digest = hashlib.sha256(data) if file.endswith(LFS) else hashlib.sha1(data)
            return self.answer(200, data, ETag=f'"{digest.hexdigest()}"', X_Repo_Commit=sha)
        if rest[:1] == ["tree"]:
            sizes = {path: {"oid": _oid(data), "size": len(data)} for path, data in files.items()}
            return self.answer(200, [{"type": "file", "path": path, **size} for path, size in sizes.items()])
        siblings = [{"rfilename": path} for path in files]
        return self.answer(200, {"id": name, "sha": sha, "siblings": siblings, "private": repository.private})


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A server on a free port of this machine."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


@pytest.fixture
def hub(tmp_path_factory, monkeypatch) -> Iterator[Hub]:
    """A Hub that huggingface_hub reaches in this process, with an empty cache and the token of a writer."""
    from huggingface_hub import constants

    cache = tmp_path_factory.mktemp("hub")
    with running_hub() as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(cache),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server

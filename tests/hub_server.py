"""The calls of the Hugging Face Hub that uploads and downloads of models make, on the standard library, in memory.

    with HubServer() as hub:                    # hub.url goes into HF_ENDPOINT, with HF_HUB_DISABLE_XET=1
        hub.add("user/name", {"config.json": b"{}"})

The token ``hf_ME`` writes as the user ``me`` (``hf_...`` of any other name as that user); anyone reads public repositories.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml


@dataclass
class Repo:
    """Commits are whole snapshots, oldest first: ``(sha, {path: content})``."""

    private: bool = False
    gated: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][1] if self.commits else {}

    def commit(self, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits.append((sha, {**self.files, **files}))
        return sha


class HubServer:
    """A request for ``/close`` is its last one.

    ``fail``: methods and parts of paths; requests that match one lose their connection.

    ``once``: (method, part of a path, what happens) for one request each: 'lose' answers nothing though it was done, a number
    is a status, bytes are the answer's body.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fail: list[tuple[str, str]] = []
        self.once: list[tuple[str, str, Any]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def __getattr__(self, name: str) -> Any:
                if name.startswith("do_"):
                    return lambda: hub.answer(self)
                raise AttributeError(name)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def add(self, name: str, files: dict[str, bytes], **kind: bool) -> None:
        self.repos[name] = Repo(**kind)
        self.repos[name].commit(files)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, body = unquote(urlsplit(request.path).path), self._body(request)
        if path == "/close":
            self.__exit__()
            return _send(request, 200, {})
        self.requests.append((request.command, path))
        if any(request.command == method and part in path for method, part in self.fail):
            request.connection.close()
            return
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        user = token.removeprefix("hf_").lower() if token.startswith("hf_") else None
        if token and user is None:
            return _send(
                request,
                401,
                {"error": "Invalid credentials"},
                {"X-Error-Message": "Invalid credentials in Authorization header"},
            )
        odd = next((one for one in self.once if one[0] == request.command and one[1] in path), None)
        if odd is not None:
            self.once.remove(odd)
        if odd is not None and odd[2] != "lose":
            status, content = (odd[2], {"error": "busy"}) if isinstance(odd[2], int) else (200, odd[2])
            return _send(request, status, content)
        for pattern, method in ROUTES:
            match = re.fullmatch(pattern, f"{request.command} {path}")
            if match and odd is not None:
                method(self, user, body, **match.groupdict())
                request.connection.close()
                return None
            if match:
                return _send(request, *method(self, user, body, **match.groupdict()))
        return _send(request, 404, {"error": f"no such call: {request.command} {path}"})

    def _body(self, request: BaseHTTPRequestHandler) -> bytes:
        if request.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(request.rfile.readline(), 16):
                parts.append(request.rfile.read(size))
                request.rfile.readline()
            request.rfile.readline()
            return b"".join(parts)
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))

    def _find(self, user: str | None, name: str, revision: str = "main") -> Any:
        """``(repo, sha, files)``, or the answer that says why not."""
        repo = self.repos.get(name)
        if repo is None or (repo.private and user != name.split("/")[0]):
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if repo.gated and user is None:
            return 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"}
        for sha, files in reversed(repo.commits):
            if revision in ("main", sha):
                return repo, sha, files
        if revision == "main":
            return repo, "0" * 40, {}
        return 404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"}

    def validate(self, user: str | None, body: bytes) -> Any:
        content = json.loads(body)["content"]
        found = re.match(r"---\n(.*?)\n---\n", content, re.S)
        data = yaml.safe_load(found[1]) if found else {}
        problems = [key for key in ("base_model", "license", "library_name", "tags") if key not in data]
        for entry in data.get("model-index", []):
            problems += [k for r in entry["results"] for k in ("task", "dataset", "metrics") if not r.get(k)]
        errors = [{"message": f"{key} is missing"} for key in problems]
        return (400 if errors else 200), {"errors": errors, "warnings": []}

    def create(self, user: str | None, body: bytes) -> Any:
        asked = json.loads(body)
        name = f"{asked.get('organization') or user}/{asked['name']}"
        if name in self.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        if asked.get("organization") not in (None, user):
            return 403, {
                "error": f"You don't have the rights to create a model under the namespace {asked['organization']}"
            }
        self.repos[name] = Repo(private=asked.get("visibility") == "private" or bool(asked.get("private")))
        return 200, {"url": f"{self.url}/{name}", "name": name, "id": name}

    def preupload(self, user: str | None, body: bytes, name: str) -> Any:
        if user != name.split("/")[0]:
            return 403, {"error": "You have read access but not the required permissions for this operation"}
        mode = {True: "lfs", False: "regular"}
        files = [
            {"path": f["path"], "uploadMode": mode[f["path"].endswith(".safetensors")], "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        return 200, {"files": files}

    def batch(self, user: str | None, body: bytes, name: str) -> Any:
        objects = [
            {**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}} for o in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def put(self, user: str | None, body: bytes, oid: str) -> Any:
        self.objects[oid] = body
        return (200 if hashlib.sha256(body).hexdigest() == oid else 400), {}

    def commit(self, user: str | None, body: bytes, name: str) -> Any:
        files: dict[str, bytes] = {}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            if line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.objects[line["value"]["oid"]]
        sha = self.repos[name].commit(files)
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha}

    def info(self, user: str | None, body: bytes, name: str, revision: str | None = None) -> Any:
        found = self._find(user, name, revision or "main")
        if isinstance(found[0], int):
            return found
        repo, sha, files = found
        siblings = [{"rfilename": path} for path in files]
        return 200, {"id": name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": [], "downloads": 0}

    def tree(self, user: str | None, body: bytes, name: str, revision: str) -> Any:
        found = self._find(user, name, revision)
        if isinstance(found[0], int):
            return found
        return 200, [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in found[2].items()
        ]

    def resolve(self, user: str | None, body: bytes, name: str, revision: str, path: str) -> Any:
        found = self._find(user, name, revision)
        if isinstance(found[0], int):
            return found
        if path not in found[2]:
            return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": found[1]}
        data = found[2][path]
        return 200, data, {"X-Repo-Commit": found[1], "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}


NAME = r"(?P<name>[^/]+/[^/]+)"
ROUTES: list[tuple[str, Any]] = [
    (r"POST /api/validate-yaml", HubServer.validate),
    (r"POST /api/repos/create", HubServer.create),
    (rf"POST /api/models/{NAME}/preupload/main", HubServer.preupload),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", HubServer.batch),
    (r"PUT /lfs/(?P<oid>\w+)", HubServer.put),
    (rf"POST /api/models/{NAME}/commit/main", HubServer.commit),
    (rf"GET /api/models/{NAME}", HubServer.info),
    (rf"GET /api/models/{NAME}/revision/(?P<revision>[^/]+)", HubServer.info),
    (rf"GET /api/models/{NAME}/tree/(?P<revision>[^/]+)", HubServer.tree),
    (rf"(?:GET|HEAD) /{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", HubServer.resolve),
]


def _send(request: BaseHTTPRequestHandler, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(data)))
    for key, value in (headers or {}).items():
        request.send_header(key, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)

"""The calls of the Hugging Face Hub that uploads and downloads of models make, in memory.

    with HubServer() as hub:                    # hub.url goes into HF_ENDPOINT, with HF_HUB_DISABLE_XET=1
        hub.add("user/name", {"config.json": b"{}"})

The token ``hf_ME`` writes as the user ``me``; anyone reads. A request for ``/close`` is the last one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = r"/(?:api/models/)?(?P<name>[^/]+/[^/.]+)"
MISSING = 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}


class HubServer:
    """Repositories as whole snapshots, oldest first: ``{name: [(sha, {path: content})]}``."""

    def __init__(self) -> None:
        self.repos: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.objects: dict[str, bytes] = {}
        self.private: set[str] = set()
        """Private repositories. New ones are private by default, as an organisation may want it."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self) -> None:
                status, content, *headers = hub.answer(self, unquote(urlsplit(self.path).path))
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **(headers[0] if headers else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_HEAD = do_POST = do_PUT = answer

        self._http, self._port = ThreadingHTTPServer(("127.0.0.1", 0), Handler), socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._port.close()

    def add(self, name: str, files: dict[str, bytes]) -> str:
        commits = self.repos.setdefault(name, [])
        sha = hashlib.sha1(repr((len(commits), sorted(files))).encode()).hexdigest()
        commits.append((sha, {**(commits[-1][1] if commits else {}), **files}))
        return sha

    def answer(self, request: BaseHTTPRequestHandler, path: str) -> tuple:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        user = request.headers.get("Authorization", "").removeprefix("Bearer hf_").lower()
        if path == "/close":
            self._http.shutdown()
            self._http.server_close()
            self._port.bind(self._http.server_address)  # it does not listen, and nobody else gets the port
            return 200, {}
        if path == "/api/validate-yaml":
            wrong = [{"message": '"license" must be one of [apache-2.0, mit]'}] if b"license: MIT" in body else []
            return 400 if wrong else 200, {"errors": wrong, "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or user}/{asked['name']}"
            known = name in self.repos
            self.private |= {name} if not known and asked.get("visibility") != "public" else set()
            self.repos.setdefault(name, [])
            return 409 if known else 200, {"url": f"{self.url}/{name}", "name": name, "id": name}
        if path.startswith("/lfs/"):
            self.objects[path.removeprefix("/lfs/")] = body
            return 200, {}
        repo = re.match(REPO, path)
        if repo is None or repo["name"] not in self.repos:
            return MISSING
        name, rest = repo["name"], path[repo.end() :]
        if rest.startswith("/preupload/"):
            files = [(file["path"], file["path"].endswith(".safetensors")) for file in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False} for p, lfs in files]
            return (200, {"files": modes}) if user == name.split("/")[0] else (403, {"error": "no permission"})
        if rest.startswith(".git/info/lfs"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if rest.startswith("/commit/"):
            lines = [(line["key"], line["value"]) for line in map(json.loads, body.splitlines())]
            files = {value["path"]: base64.b64decode(value["content"]) for key, value in lines if key == "file"}
            files |= {value["path"]: self.objects[value["oid"]] for key, value in lines if key == "lfsFile"}
            sha = self.add(name, files)
            for gone in (value["path"] for key, value in lines if key == "deletedFile"):
                del self.repos[name][-1][1][gone]
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha}
        sha, files = self.repos[name][-1] if self.repos[name] else ("0" * 40, {})
        if "/resolve/" in rest:
            found = files.get(rest.split("/", 3)[3])
            headers = {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha1(found or b"").hexdigest()}"'}
            return (404, {}, {"X-Error-Code": "EntryNotFound", **headers}) if found is None else (200, found, headers)
        if "/tree/" in rest:
            return 200, [{"type": "file", "path": p, "size": len(f), "oid": "0" * 40} for p, f in files.items()]
        told = {"siblings": [{"rfilename": p} for p in files], "private": name in self.private}
        return 200, {"id": name, "sha": sha, "tags": [], "downloads": 0, **told}

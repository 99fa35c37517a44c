"""A hub on loopback: what huggingface_hub asks for when a model is uploaded, kept in memory and recorded.

    with FakeHub() as hub:
        ...                                       # HF_ENDPOINT=hub.url, HF_TOKEN=hub.token, no Xet
    hub.commits                                   # in their order, each with the paths in theirs
    hub.received                                  # sha256 of each large file that came, in their order

It answers as the hub does: large files by the LFS protocol (one PUT, or several where `part_size` is set),
small ones inside of the commit, 412 for a commit on another parent than the head, and an error for a commit
that names a large file which has not come. A file is a large one by its name: .safetensors, .bin,
tokenizer.json.

What goes wrong is set beforehand: `fail_every`, `mishaps`, `conflicts`, `refuse`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = re.compile(r".*\.(safetensors|bin)|(.*/)?tokenizer\.json")
Files = dict[str, tuple[bytes, bool]]  # path -> content, whether it is a large one


@dataclass
class Commit:
    """One commit as it was asked for: `paths` in the order of the request."""

    repo_id: str
    ref: str
    message: str
    paths: list[str]


@dataclass
class Repo:
    """What a repository holds: each branch (and pull request) a list of states, the last one its head."""

    private: bool
    writable: bool = True
    ignored: set[str] = field(default_factory=set)  # by a .gitignore
    refs: dict[str, list[Files]] = field(default_factory=lambda: {"main": [{".gitattributes": (b"", False)}]})
    tags: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)  # titles of pull requests, the first is number 1

    def sha(self, ref: str) -> str:
        return hashlib.sha1(f"{ref} {len(self.refs[ref])} {sorted(self.refs[ref][-1])}".encode()).hexdigest()


class Answer(Exception):
    """An error status with what the hub says beside it."""

    def __init__(self, status: int, text: str = "", code: str = "", **more: str) -> None:
        super().__init__(status, text)
        self.status, self.code = status, code
        self.content = {"error": text, **more}


class FakeHub:
    """The server and everything that it holds; a context manager."""

    def __init__(self) -> None:
        self.token = "hf_" + "s3cret" * 4
        self.user: dict[str, Any] = {
            "type": "user",
            "name": "mary",
            "orgs": [{"name": "lab", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}],
            "auth": {"accessToken": {"role": "write"}},
        }
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        # ------------------------------------------------------------ what was seen
        self.requests: list[str] = []
        self.received: list[str] = []
        self.commits: list[Commit] = []
        self.hanging = threading.Event()  # set while a request is being left without an answer
        # ------------------------------------------------------------ what goes wrong
        self.fail_every = 0  # one request in so many: "500", "drop", "lose" by turns
        self.mishaps: list[tuple[str, str]] = []  # (beginning of a request, what happens to it), each once:
        # "500"; "drop": no answer; "lose": done and no answer; "hang": silence; "": nothing, to let one pass
        self.conflicts = 0  # commits that are answered with 412, as if somebody else had been faster
        self.refuse: dict[str, int] = {}  # beginning of a request -> status
        self.silent = False  # no word of what the files in a repository are
        self.part_size = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failures = 0

    def __enter__(self) -> FakeHub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files(self, repo_id: str, ref: str = "main") -> dict[str, bytes]:
        """Path -> content of what a branch holds now."""
        return {path: raw for path, (raw, _) in self.repos[repo_id].refs[ref][-1].items() if path[0] != "."}

    # -------------------------------------------------------------------- what goes wrong

    def misfortune(self, request: str) -> str:
        """What happens to this request, "" for nothing."""
        with self._lock:
            self.requests.append(request)
            for mishap in self.mishaps:
                if request.startswith(mishap[0]):
                    self.mishaps.remove(mishap)
                    return mishap[1]
            if self.fail_every and len(self.requests) % self.fail_every == 0:
                self._failures += 1
                return ("500", "drop", "lose")[self._failures % 3]
        return ""

    def hang(self) -> None:
        self.hanging.set()
        self._over.wait(250)

    # -------------------------------------------------------------------- answers

    def answer(self, request: str, query: dict[str, list[str]], token: str, body: bytes) -> Any:
        """The JSON of an answer; raises `Answer` for an error."""
        for start, status in self.refuse.items():
            if request.startswith(start):
                raise Answer(status, f"no, {token}")  # a server that is careless with what it was sent
        if " /objects/" not in request and token != self.token:
            raise Answer(401, "Invalid credentials in Authorization header")
        for pattern, method in _ROUTES:
            match = re.fullmatch(pattern, request)
            if match:
                with self._lock:
                    return method(self, query, body, *(unquote(group) for group in match.groups()))
        raise Answer(404, f"{request} is not known")

    def _repo(self, repo_id: str) -> Repo:
        if repo_id not in self.repos:
            raise Answer(404, "Repository not found", "RepoNotFound")
        return self.repos[repo_id]

    def whoami(self, query: Any, body: bytes) -> Any:
        return self.user

    def create(self, query: Any, body: bytes) -> Any:
        asked = json.loads(body)
        owner = asked["organization"] or self.user["name"]
        repo_id = f"{owner}/{asked['name']}"
        if owner != self.user["name"] and owner not in {org["name"] for org in self.user["orgs"]}:
            raise Answer(403, f"You have no rights under {owner}")
        if repo_id in self.repos:
            raise Answer(409, "You already created this model repo", url=f"{self.url}/{repo_id}")
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.repos[repo_id] = Repo(private)
        return {"url": f"{self.url}/{repo_id}"}

    def info(self, query: Any, body: bytes, repo_id: str, ref: str = "main") -> Any:
        repo = self._repo(repo_id)
        known = {repo.sha(name): name for name in repo.refs} | dict.fromkeys(repo.tags, "main")
        ref = known.get(ref, ref)
        if ref not in repo.refs:
            raise Answer(404, "Invalid rev id", "RevisionNotFound")
        siblings = []
        for path, (raw, large) in repo.refs[ref][-1].items():
            sibling: dict[str, Any] = {"rfilename": path}
            if "blobs" in query and not self.silent:
                sibling |= {"size": len(raw), "blobId": _git_hash(raw)}
                if large:
                    sha256 = hashlib.sha256(raw).hexdigest()
                    sibling["lfs"] = {"size": len(raw), "sha256": sha256, "pointerSize": 130}
            siblings.append(sibling)
        return {"id": repo_id, "sha": repo.sha(ref), "private": repo.private, "siblings": siblings}

    def may_write(self, query: Any, body: bytes, repo_id: str) -> Any:
        if not self._repo(repo_id).writable:
            raise Answer(403, "You have no write access")
        return {}

    def list_refs(self, query: Any, body: bytes, repo_id: str) -> Any:
        repo = self._repo(repo_id)
        return {
            "branches": [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": repo.sha(name)}
                for name in repo.refs
                if not name.startswith("refs/pr/")
            ],
            "converts": [],
            "tags": [],
        }

    def branch(self, query: Any, body: bytes, repo_id: str, name: str) -> Any:
        repo = self._repo(repo_id)
        if name in repo.refs:
            raise Answer(409, "Reference already exists")
        repo.refs[name] = [dict(repo.refs["main"][-1])]
        return {}

    def discussions(self, query: Any, body: bytes, repo_id: str) -> Any:
        found = [
            {
                "num": number,
                "title": title,
                "status": "open",
                "isPullRequest": True,
                "author": {"name": self.user["name"]},
                "createdAt": "2026-01-01T00:00:00.000Z",
                "repo": {"name": repo_id, "type": "model"},
            }
            for number, title in enumerate(self._repo(repo_id).requests, 1)
        ]
        return {"discussions": found, "count": len(found), "start": 0}

    def preupload(self, query: Any, body: bytes, repo_id: str, ref: str) -> Any:
        repo = self._repo(repo_id)
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if LARGE.fullmatch(file["path"]) else "regular",
                    "shouldIgnore": file["path"] in repo.ignored,
                }
                for file in json.loads(body)["files"]
            ]
        }

    def batch(self, query: Any, body: bytes, repo_id: str) -> Any:
        self._repo(repo_id)
        objects = []
        for asked in json.loads(body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            answer = {"oid": oid, "size": size}
            if oid not in self.objects:
                upload: dict[str, Any] = {"href": f"{self.url}/objects/{oid}?signature=s1gned"}
                if self.part_size and size > self.part_size:
                    count = -(-size // self.part_size)
                    parts = {str(n): f"{self.url}/objects/{oid}/{n}" for n in range(1, count + 1)}
                    upload["header"] = {"chunk_size": str(self.part_size), **parts}
                answer["actions"] = {"upload": upload}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def put(self, query: Any, body: bytes, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Answer(400, "not what it was said to be")
        self.objects[oid] = body
        self.received.append(oid)
        return {}

    def put_part(self, query: Any, body: bytes, oid: str, number: str) -> Any:
        self.parts.setdefault(oid, {})[int(number)] = body
        return {}

    def complete(self, query: Any, body: bytes, oid: str) -> Any:
        parts = self.parts[oid]
        return self.put(query, b"".join(parts[number] for number in sorted(parts)), oid)

    def commit(self, query: Any, body: bytes, repo_id: str, ref: str) -> Any:
        repo = self._repo(repo_id)
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        if self.conflicts:
            self.conflicts -= 1
            repo.refs[ref].append({**repo.refs[ref][-1], f"other{self.conflicts}.txt": (b"other", False)})
        if header.get("parentCommit") not in {None, repo.sha(ref)}:
            raise Answer(412, "A commit has happened since. Please refresh and try again.")
        files: Files = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = (base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile" and len(self.objects.get(value["oid"], b"")) == value["size"]:
                files[value["path"]] = (self.objects[value["oid"]], True)
            else:
                raise Answer(400, f"{line['key']} {value} cannot be committed")
        url = None
        base = repo.refs[ref][-1]
        if "create_pr" in query:
            repo.requests.append(header["summary"])
            ref = f"refs/pr/{len(repo.requests)}"
            url = f"{self.url}/{repo_id}/discussions/{len(repo.requests)}"
        repo.refs.setdefault(ref, []).append({**base, **files})
        self.commits.append(Commit(repo_id, ref, header["summary"], list(files)))
        sha = repo.sha(ref)
        return {"commitUrl": f"{self.url}/{repo_id}/commit/{sha}", "commitOid": sha, "pullRequestUrl": url}


Route = tuple[str, Callable[..., Any]]
_ROUTES: list[Route] = [
    ("GET /api/whoami-v2", FakeHub.whoami),
    ("POST /api/repos/create", FakeHub.create),
    ("GET /api/models/([^/]+/[^/]+)", FakeHub.info),
    ("GET /api/models/([^/]+/[^/]+)/revision/([^/]+)", FakeHub.info),
    ("GET /api/models/([^/]+/[^/]+)/auth-check/write", FakeHub.may_write),
    ("GET /api/models/([^/]+/[^/]+)/refs", FakeHub.list_refs),
    ("GET /api/models/([^/]+/[^/]+)/discussions", FakeHub.discussions),
    ("POST /api/models/([^/]+/[^/]+)/branch/([^/]+)", FakeHub.branch),
    ("POST /api/models/([^/]+/[^/]+)/preupload/([^/]+)", FakeHub.preupload),
    ("POST /api/models/([^/]+/[^/]+)/commit/([^/]+)", FakeHub.commit),
    (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", FakeHub.batch),
    ("PUT /objects/([^/]+)", FakeHub.put),
    ("PUT /objects/([^/]+)/([0-9]+)", FakeHub.put_part),
    ("POST /objects/([^/]+)", FakeHub.complete),
]


def _git_hash(raw: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # head and body of an answer in one packet: two would wait for each other

        def log_message(self, *_: object) -> None:
            pass

        def _handle(self) -> None:
            url = urlsplit(self.path)
            request = f"{self.command} {url.path}"
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            what = hub.misfortune(request)
            if what == "hang":
                hub.hang()
            if what in {"hang", "drop"}:
                self.close_connection = True
                return
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            try:
                if what == "500":
                    raise Answer(500, "Internal error")
                status, headers = 200, {"ETag": '"part"'}
                content = hub.answer(request, parse_qs(url.query), token, body)
            except Answer as answer:
                status, content = answer.status, answer.content
                headers = {"X-Error-Code": answer.code} if answer.code else {}
            if what == "lose":
                self.close_connection = True
                return
            raw = json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PUT = _handle

    return Handler

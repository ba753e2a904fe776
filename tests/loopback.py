"""A Hub on 127.0.0.1 for the real `huggingface_hub` client: repositories in memory, and faults on
demand.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN, USER = "hf_loopback", "user"
REPO = f"{USER}/tiny"  # where tests push
COMMITS = count()
LICENSES = {"apache-2.0", "mit", "llama3.2", "gemma", "other"}


@dataclass
class Commit:
    """The whole tree at one commit, by path, and which of the files are large."""

    oid: str
    files: dict[str, bytes]
    large: set[str] = field(default_factory=set)
    title: str = ""


@dataclass
class Repo:
    """A repository's refs; every ref names a commit."""

    kind: str
    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def add(self, ref: str, files: dict[str, bytes], large: set[str], title: str) -> Commit:
        oid = hashlib.sha1(
            f"commit {next(COMMITS)}".encode()
        ).hexdigest()  # never one that a client's cache knows
        self.commits[oid] = Commit(oid, files, large, title)
        self.refs[ref] = oid
        return self.commits[oid]

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


class LoopbackHub(ThreadingHTTPServer):
    """Start it with `start()`; `url` is its endpoint.

    Attributes:
        repos: by kind ("models", "spaces", "datasets") and id.
        calls: every request, "METHOD path".
        drop_at: the index of a call whose connection is cut before anything happens; None for none.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.drop_at: int | None = None

    def start(self) -> "LoopbackHub":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def files(self, name: str, revision: str = "main", kind: str = "models") -> dict[str, bytes]:
        """What a repository holds."""
        return self.repos[kind, name].at(revision).files

    def handle_error(self, request, client_address) -> None:
        pass  # a client that went away is none of the tests' business


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait 40 ms for the headers to be acknowledged
    server: LoopbackHub

    def log_message(self, *args) -> None:
        pass

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(self._chunks())
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        with self.server.lock:
            self.server.calls.append(f"{self.command} {url.path}")
            if self.server.drop_at == len(self.server.calls) - 1:
                self.close_connection = True
                self.connection.close()
                return
            self._route([unquote(part) for part in url.path.strip("/").split("/")])

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _send(
        self, status: int, content: bytes | dict | list = b"", headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        self._send(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def _route(self, parts: list[str]) -> None:
        match parts:
            case ["api", "whoami-v2"]:
                self._send(
                    200,
                    {"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token"}},
                )
            case ["api", "repos", "create"]:
                self._create(json.loads(self.body))
            case ["api", "repos", "delete"]:
                asked = json.loads(self.body)
                self.server.repos.pop(
                    (
                        asked.get("type", "model") + "s",
                        f"{asked.get('organization') or USER}/{asked['name']}",
                    )
                )
                self._send(200, {})
            case ["api", "validate-yaml"]:
                self._validate(json.loads(self.body)["content"])
            case ["lfs", oid]:
                self.server.blobs[oid] = self.body
                good = hashlib.sha256(self.body).hexdigest() == oid
                self._send(200 if good else 400)
            case [*_, user, name, "info", "lfs", "objects", "batch"] if name.endswith(".git"):
                self._batch(json.loads(self.body))
            case ["api", kind, user, name, *rest] if kind in ("models", "spaces", "datasets"):
                self._with_repo(kind, f"{user}/{name}", lambda repo: self._api(repo, rest))
            case ["spaces" | "datasets" as kind, user, name, "resolve", revision, *path]:
                self._with_repo(
                    kind,
                    f"{user}/{name}",
                    lambda repo: self._resolve(repo, revision, "/".join(path)),
                )
            case [user, name, "resolve", revision, *path]:
                self._with_repo(
                    "models",
                    f"{user}/{name}",
                    lambda repo: self._resolve(repo, revision, "/".join(path)),
                )
            case _:
                self._fail(404, "RepoNotFound")

    def _create(self, asked: dict) -> None:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        kind = asked.get("type", "model") + "s"
        url = {
            "url": f"{self.server.url}/{'' if kind == 'models' else kind + '/'}{name}",
            "name": name,
        }
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._fail(401, "Unauthorized")
        elif (kind, name) in self.server.repos:
            self._send(409, url)
        else:
            repo = self.server.repos[kind, name] = Repo(
                kind,
                name,
                private=bool(asked.get("private") or asked.get("visibility") == "private"),
            )
            repo.add(
                "main", {".gitattributes": b"*.safetensors filter=lfs\n"}, set(), "initial commit"
            )
            self._send(200, url)

    def _validate(self, content: str) -> None:
        """What the Hub says of a card's front matter, in the parts that matter here."""
        errors = []
        data = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else {}
        if data.get("license", "other") not in LICENSES:
            errors.append({"message": f'"license" must be one of {sorted(LICENSES)}'})
        if not all(isinstance(tag, str) for tag in data.get("tags", [])):
            errors.append({"message": '"tags" must be strings'})
        if data.get("base_model_relation", "adapter") not in (
            "adapter",
            "finetune",
            "quantized",
            "merge",
        ):
            errors.append({"message": '"base_model_relation" is unknown'})
        if any(len(str(name).split("/")) > 2 for name in [data.get("base_model", "")]):
            errors.append({"message": '"base_model" must be a repository'})
        self._send(400 if errors else 200, {"errors": errors, "warnings": []})

    def _batch(self, asked: dict) -> None:
        objects = []
        for wanted in asked["objects"]:
            upload = {"upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}", "header": {}}}
            objects.append(
                {**wanted, **({} if wanted["oid"] in self.server.blobs else {"actions": upload})}
            )
        self._send(
            200,
            {"transfer": "basic", "objects": objects},
            {"Content-Type": "application/vnd.git-lfs+json"},
        )

    def _with_repo(self, kind: str, name: str, then) -> None:
        repo = self.server.repos.get((kind, name))
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not known):
            self._fail(404 if known else 401, "RepoNotFound")
        elif repo.gated and "resolve" in self.path:
            self._fail(403, "GatedRepo")
        else:
            then(repo)

    def _api(self, repo: Repo, rest: list[str]) -> None:
        match rest:
            case [] | ["revision", _]:
                commit = repo.at(rest[1] if rest else "main")
                if commit is None:
                    self._fail(404, "RevisionNotFound")
                    return
                info = {
                    "id": repo.name,
                    "sha": commit.oid,
                    "private": repo.private,
                    "gated": repo.gated,
                    "tags": [],
                }
                self._send(
                    200,
                    {**info, "siblings": [{"rfilename": path} for path in sorted(commit.files)]},
                )
            case ["tree", revision, *folder]:
                commit = repo.at(revision)
                if commit is None:
                    self._fail(404, "RevisionNotFound")
                else:
                    self._send(
                        200,
                        [
                            self._entry(commit, path)
                            for path in commit.files
                            if path.startswith("/".join(folder))
                        ],
                    )
            case ["preupload", revision]:
                if "create_pr" not in self.query and repo.at(revision) is None:
                    self._fail(404, "RevisionNotFound")
                    return
                paths = [file["path"] for file in json.loads(self.body)["files"]]
                modes = {
                    path: "lfs" if path.endswith((".safetensors", ".png")) else "regular"
                    for path in paths
                }
                files = [
                    {"path": path, "uploadMode": mode, "shouldIgnore": False}
                    for path, mode in modes.items()
                ]
                self._send(200, {"files": files})
            case ["commit", revision]:
                self._commit(repo, revision)
            case ["branch", branch]:
                repo.refs[branch] = repo.refs[
                    json.loads(self.body or b"{}").get("startingPoint") or "main"
                ]
                self._send(200, {})
            case ["tag", revision]:
                repo.refs[json.loads(self.body)["tag"]] = repo.at(revision).oid
                self._send(200, {})
            case ["refs"]:
                refs = [
                    {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid}
                    for name, oid in repo.refs.items()
                ]
                self._send(200, {"branches": refs, "converts": [], "tags": []})
            case _:
                self._fail(404, "EntryNotFound")

    def _commit(self, repo: Repo, revision: str) -> None:
        parent = repo.at(revision)
        files, large, title = dict(parent.files), set(parent.large), ""
        for line in filter(None, self.body.splitlines()):
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    title = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.blobs[value["oid"]]
                    large.add(value["path"])
                case "deletedFile":
                    files.pop(value["path"], None)
        ref, pull = revision, {}
        if "create_pr" in self.query:
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.refs)
            ref = f"refs/pr/{number}"
            pull = {"pullRequestUrl": f"{self.server.url}/{repo.name}/discussions/{number}"}
        commit = repo.add(ref, files, large, title)
        self._send(
            200,
            {
                "success": True,
                "commitOid": commit.oid,
                "commitUrl": f"{self.server.url}/{repo.name}",
                **pull,
            },
        )

    def _entry(self, commit: Commit, path: str) -> dict:
        content = commit.files[path]
        sha = hashlib.sha256(content).hexdigest()
        entry = {"type": "file", "path": path, "size": len(content), "oid": self._git_oid(content)}
        return (
            {**entry, "lfs": {"oid": sha, "size": len(content), "pointerSize": 134}}
            if path in commit.large
            else entry
        )

    @staticmethod
    def _git_oid(content: bytes) -> str:
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()

    def _resolve(self, repo: Repo, revision: str, path: str) -> None:
        commit = repo.at(revision)
        if commit is None:
            self._fail(404, "RevisionNotFound")
            return
        if path not in commit.files:
            headers = {
                "X-Repo-Commit": commit.oid,
                "X-Error-Code": "EntryNotFound",
                "X-Error-Message": "Entry not found",
            }
            self._send(404, b"", headers)
            return
        content = commit.files[path]
        headers = {
            "X-Repo-Commit": commit.oid,
            "ETag": f'"{self._git_oid(content)}"',
            "Accept-Ranges": "bytes",
        }
        if path in commit.large:
            headers |= {
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
            }
        if (asked := self.headers.get("Range")) and self.command == "GET":
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            end = int(end) if end else len(content) - 1
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            self._send(206, content[int(begin) : end + 1], headers)
        else:
            self._send(200, content, headers)


if __name__ == "__main__":  # a Hub to try the client against: python tests/loopback.py
    local = LoopbackHub().start()
    # Xet is the real Hub's alone
    print(f"export HF_ENDPOINT={local.url} HF_TOKEN={TOKEN} HF_HUB_DISABLE_XET=1", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()

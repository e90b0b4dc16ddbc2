"""A stand-in for the W&B server: answers what the client of wandb 0.31 asks, and keeps what it sends."""

import base64
import contextlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

KEY = "a" * 40
ENTITY = "someone"


class WandbServer:
    """Serves from a thread, while it is open as a context manager, and takes one run, which may be resumed.

    Args:
        dies_after_start: answers nothing from the moment that a run has been made.
        dies_at: answers nothing from this path or GraphQL operation on.
    """

    def __init__(self, *, dies_after_start: bool = False, dies_at: str | None = None) -> None:
        self.connections = 0
        """Of all clients, whatever they asked."""
        self.run: dict[str, Any] = {}
        """Newest value of every field that the client set."""
        self.ids: set[str] = set()
        """Of all runs that clients began or resumed; this server keeps them as one."""
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        """Set with the last word of the client on the run."""
        self.files: dict[str, bytes] = {}
        """Uploads, by the path in the run, those of its artifact below ``artifact/``."""
        self.committed: list[str] = []
        """Names of artifacts that are complete."""
        self.refused: list[str] = []
        """Requests that have no answer here."""
        self._dies_after_start, self._dies_at, self._dead, self._artifact = dies_after_start, dies_at, False, ""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: bytes, authorization: str | None) -> tuple[int, object]:
        """Status and JSON of the answer to a request."""
        if path.startswith("/sdk/otel/"):  # the client's measurements of itself
            return 200, {}
        if self._dies_at and (path == self._dies_at or f" {self._dies_at} ".encode() in body):
            self._dead = True
        if self._dead or (self._dies_after_start and self.run):
            self._closed.wait()
        with self._lock:
            if path.startswith("/upload/"):
                self.files[path.removeprefix("/upload/")] = body
                return 200, {}
            if authorization != "Basic " + base64.b64encode(f"api:{KEY}".encode()).decode():
                return 401, {"error": "no such key"}
            if path == "/graphql":
                request = json.loads(body)
                _, operation, *_ = re.split(r"\W+", request["query"].strip())  # not every client names it beside
                return self._graphql(operation, request.get("variables") or {})
            if path == f"/files/{ENTITY}/{self.run.get('project')}/{self.run.get('name')}/file_stream":
                self._file_stream(json.loads(body))
                return 200, {}
            self.refused.append(path)
            return 404, {}

    def _graphql(self, operation: str, variables: dict[str, Any]) -> tuple[int, object]:
        answers: dict[str, Callable[[dict[str, Any]], object]] = {
            "Viewer": lambda _: {"viewer": {"id": "v", "entity": ENTITY, "username": ENTITY}},
            "ServerFeaturesQuery": lambda _: {"serverInfo": {"features": []}},
            "OrganizationCoreWeaveOrganizationID": lambda _: {"entity": None},
            "RunResumeStatus": lambda given: {"model": {"bucket": self._known(given["name"])}},
            "UpsertBucket": self._upsert_run,
            "CreateRunFiles": lambda given: {
                "createRunFiles": {"runID": "r", "uploadHeaders": [], "files": [*map(self._slot, given["files"])]}
            },
            "ArtifactType": lambda _: {"project": {"artifact": None}},
            "CreateArtifact": self._create_artifact,
            "CreateArtifactManifest": lambda _: {
                "createArtifactManifest": {"artifactManifest": {"id": "m", "file": self._slot("artifact/manifest")}}
            },
            "CreateArtifactFiles": lambda given: {
                "createArtifactFiles": {
                    "files": {
                        "edges": [
                            {"node": {**self._slot(f"artifact/{file['name']}"), "artifact": {"id": "a"}}}
                            for file in given["input"]["artifactFiles"]
                        ]
                    }
                }
            },
            "CommitArtifact": self._commit_artifact,
        }
        if operation not in answers:
            self.refused.append(operation)
            return 200, {"errors": [{"message": f"{operation} has no answer"}]}
        return 200, {"data": answers[operation](variables)}

    def _slot(self, name: str) -> dict[str, Any]:
        return {"id": "f", "name": name, "uploadUrl": f"{self.url}/upload/{name}", "uploadHeaders": []}

    def _known(self, name: str) -> object:
        """What a client that resumes the run goes on from; None if there is no such run."""
        if name not in self.ids:
            return None
        return {
            "id": "r", "name": name, "config": self.run["config"], "wandbConfig": '{"t": 1}', "tags": [],
            "summaryMetrics": json.dumps(self.summary), "historyTail": json.dumps([json.dumps(self.history[-1])]),
            "eventsTail": "[]", "historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0,
        }  # fmt: skip

    def _upsert_run(self, given: dict[str, Any]) -> object:
        inserted = given["name"] not in self.ids
        self.ids.add(given["name"])
        self.run |= {name: value for name, value in given.items() if value is not None}
        project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": ENTITY}}
        bucket = {"id": "r", "name": given["name"], "displayName": self.run.get("displayName"), "project": project}
        return {"upsertBucket": {"bucket": {**bucket, "config": "{}", "historyLineCount": 0}, "inserted": inserted}}

    def _create_artifact(self, given: dict[str, Any]) -> object:
        self._artifact = given["input"]["artifactCollectionName"]
        artifact = {"id": "a", "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}

    def _commit_artifact(self, _: dict[str, Any]) -> object:
        self.committed.append(self._artifact)
        return {"commitArtifact": {"artifact": {"id": "a", "digest": "d"}}}

    def _file_stream(self, sent: dict[str, Any]) -> None:
        for name, lines in sent.get("files", {}).items():
            if name == "wandb-history.jsonl":
                self.history[lines["offset"] :] = map(json.loads, lines["content"])
            elif name == "wandb-summary.json":
                self.summary = json.loads(lines["content"][-1])
        if sent.get("complete"):
            self.exit_code = sent["exitcode"]


def _handler(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            server.connections += 1
            super().setup()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, answer = server.answer(self.path, body, self.headers.get("authorization"))
            content = json.dumps(answer).encode()
            with contextlib.suppress(ConnectionError):  # a client that waits no more
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_PUT = do_POST

        def log_message(self, *_: object) -> None:
            pass

    return Handler

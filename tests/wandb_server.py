"""A server on this machine that answers wandb as far as a run needs it, and keeps the rows of the runs."""

import gzip
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PROJECT = {"id": "project", "name": "project", "entity": {"id": "entity", "name": "entity"}}
_ANSWERS = {  # to operations of GraphQL that need nothing of a run
    "Viewer": {"viewer": {"id": "user", "entity": "entity", "username": "user", "flags": "{}"}},  # a check of the login
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
}


class WandbServer(ThreadingHTTPServer):
    """Attributes: `rows` and `summaries`, the rows and the summary of a run by its ID."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows, self.summaries = {}, {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def stream(self, run_id, data):
        """Take a part of a run: its rows replace those from `offset` on."""
        for name, chunk in (data.get("files") or {}).items():
            begin, lines = chunk["offset"], chunk["content"]
            if name.endswith("history.jsonl"):
                self.rows[run_id][begin : begin + len(lines)] = map(json.loads, lines)
            elif name.endswith("summary.json"):
                self.summaries[run_id] = json.loads(lines[-1])
        return {"limits": {}}

    def answer(self, operation, values):
        """Answer an operation of GraphQL."""
        if operation == "UpsertBucket":
            run_id = values["name"] or values["id"]
            is_new = run_id not in self.rows
            self.rows.setdefault(run_id, [])
            return {"upsertBucket": {"bucket": self._bucket(run_id), "inserted": is_new}}
        if operation == "RunResumeStatus":
            return {"model": {**_PROJECT, "bucket": self._resumable(values["name"])}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": values["run"], "uploadHeaders": [], "files": []}}
        return _ANSWERS.get(operation, {})

    def _bucket(self, run_id):
        names = dict.fromkeys(("id", "name", "displayName"), run_id)
        return {**names, "config": "{}", "project": _PROJECT, "historyLineCount": len(self.rows[run_id])}

    def _resumable(self, run_id):
        if run_id not in self.rows:
            return None
        return {
            **self._bucket(run_id),
            **{"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "tags": [], "wandbConfig": '{"t": 1}'},
            "summaryMetrics": json.dumps(self.summaries.get(run_id, {})),
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[run_id][-1:]]),
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        answer = {}
        if self.path.endswith("/file_stream"):
            answer = self.server.stream(self.path.split("/")[-2], json.loads(body))
        elif self.path == "/graphql":
            request = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
            answer = {"data": self.server.answer(operation, request.get("variables") or {})}
        content = json.dumps(answer).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def serving():
    """A server that answers inside the block."""
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()

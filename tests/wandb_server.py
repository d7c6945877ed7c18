"""A server on this machine that answers wandb as far as a run needs it, and keeps the rows of the runs."""

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WandbServer:
    """A context manager: the server runs inside the block.

    Attributes:
        rows: the rows of a run, by ID.
    """

    def __init__(self):
        self.rows, self.summaries, self.is_closed = {}, {}, False
        handler = type("Handler", (_Handler,), {"wandb": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.is_closed = True  # for connections that stay open
        self._server.shutdown()
        self._server.server_close()

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
        """Answer a GraphQL operation."""
        if operation == "Viewer":  # a check of the login
            return {"data": {"viewer": {"id": "user", "entity": "entity", "username": "user", "flags": "{}"}}}
        if operation == "UpsertBucket":
            run_id = values["name"] or values["id"]
            is_new = run_id not in self.rows
            self.rows.setdefault(run_id, [])
            return {"data": {"upsertBucket": {"bucket": self._bucket(run_id), "inserted": is_new}}}
        if operation == "RunResumeStatus":
            return {"data": {"model": {**_PROJECT, "bucket": self._resumable(values["name"])}}}
        if operation == "CreateRunFiles":
            return {"data": {"createRunFiles": {"runID": values["run"], "uploadHeaders": [], "files": []}}}
        if operation == "ServerFeaturesQuery":
            return {"data": {"serverInfo": {"features": []}}}
        return {"data": {}}

    def _bucket(self, run_id):
        return {
            **{"id": run_id, "name": run_id, "displayName": run_id, "config": "{}", "project": _PROJECT},
            "historyLineCount": len(self.rows[run_id]),
        }

    def _resumable(self, run_id):
        if run_id not in self.rows:
            return None
        return {
            **self._bucket(run_id),
            **{"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "tags": [], "wandbConfig": '{"t": 1}'},
            "summaryMetrics": json.dumps(self.summaries.get(run_id, {})),
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[run_id][-1:]]),
        }


_PROJECT = {"id": "project", "name": "project", "entity": {"id": "entity", "name": "entity"}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wandb: WandbServer

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.wandb.is_closed:
            self.close_connection = True
            return
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        if self.path.endswith("/file_stream"):
            self._reply(200, self.wandb.stream(self.path.split("/")[-2], json.loads(body)))
        elif self.path == "/graphql":
            request = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
            self._reply(200, self.wandb.answer(operation, request.get("variables") or {}))
        else:
            self._reply(404, {})

    def _reply(self, status, answer):
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

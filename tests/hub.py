"""A small server with the layout of the Hugging Face hub, and what the tests of scripts that read from it share."""

import functools
import io
import json
import runpy
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT

from data import vocabulary

huggingface_hub = pytest.importorskip("huggingface_hub")
pyarrow = pytest.importorskip("pyarrow")


class Hub(BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub: information on the repository, its tree of files, and ranges of bytes."""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        files = self.server.files  # path: content; None stands for a file that may not be read
        dataset = self.server.dataset
        name, tree = path.removeprefix(f"/datasets/{dataset}/resolve/main/"), f"/api/datasets/{dataset}/tree/main"
        if files and path in (f"/api/datasets/{dataset}/revision/main", f"/api/datasets/{dataset}"):
            self.answer(200, json.dumps({"id": dataset, "sha": "0" * 40, "siblings": []}).encode())
        elif files and path.startswith(tree):
            entries = [
                {"type": "file", "path": name, "size": len(content or b"any"), "oid": "0" * 40}
                for name, content in files.items()
                if name.startswith(path.removeprefix(tree).removeprefix("/"))
            ]
            self.answer(200, json.dumps(entries).encode())
        elif name not in files:
            self.answer(404, b"", "RepoNotFound")
        elif files[name] is None:
            self.answer(403, b"")
        else:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            self.answer(206, files[name][int(first) : int(last) + 1])

    def answer(self, status, body, error=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def serving(dataset, monkeypatch):
    """A server of a dataset that huggingface_hub takes for the hub. `files` of it are its files by path."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.dataset, server.files = dataset, {}
        options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "token": False, "skip_instance_cache": True}
        monkeypatch.setattr(huggingface_hub, "HfFileSystem", functools.partial(huggingface_hub.HfFileSystem, **options))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


class Letters:
    """Stands for GPT-2's encoding, which is a download: one token per character."""

    eot_token = 0

    def encode_ordinary(self, text):
        return [ord(character) for character in text]


def script_with(name, folder, constants, monkeypatch):
    """A copy of data/<name>/prepare.py with other constants and without GPT-2's encoding, and a function that runs it."""
    source = Path(ROOT, "data", name, "prepare.py").read_text(encoding="utf-8")
    for constant, value in constants.items():
        assert constant in source
        source = source.replace(constant, value)
    script = folder / "data" / name / "prepare.py"
    script.parent.mkdir(parents=True)
    script.write_text(source, encoding="utf-8")
    monkeypatch.setattr(vocabulary, "gpt2_encoding", Letters)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        runpy.run_path(str(script), run_name="__main__")

    return script, run


def refusal(capsys, run, *arguments):
    """The last line of stderr, an error: a script ends with exit code 2."""
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def parquet(*texts, rows=None):
    """The content of a file with these texts, `rows` in each row group."""
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"title": ["not this"] * len(texts), "text": texts}), file, row_group_size=rows)
    return file.getvalue()

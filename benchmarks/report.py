"""Print tables, and write them to a folder of results: text, CSV, JSON and pictures."""

import csv
import io
import json
import os
from typing import Any

from charts.style import save

PARTS = ("parameters", "gradients", "state", "master", "buckets", "activations", "rest")
IN_BYTES = ("total", "predicted", "resident peak", *PARTS)  # the tables show them in MB
HIDDEN = ("own computation, ms",)  # printed beside the table


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text. With a column "point", an empty line stands between different cells to the left of it."""
    shown = [column for column in _columns(rows) if column not in HIDDEN]
    columns = [column for column in shown if any(row.get(column) is not None for row in rows)]
    cells = [columns, *([_cell(column, row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    has_names = isinstance(rows[0][columns[0]], str)
    lines = []
    for number, line in enumerate(cells):
        group = line[: columns.index("point")] if "point" in columns else []
        if number and group != cells[number - 1][: len(group)]:
            lines.append("")
        first = line[0].ljust(widths[0]) if has_names else line[0].rjust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column in IN_BYTES:
        return f"{value / 1e6:.1f}"
    if isinstance(value, float):
        if column.endswith("%"):
            return f"{round(value, 1) + 0:.1f}"  # no -0.0
        return f"{value:.1f}" if column.endswith(", ms") or "MB" in column or column == "ms per step" else f"{value:.3f}"
    return str(value)


def comma_separated(rows: list[dict[str, Any]]) -> str:
    """Return the rows as CSV."""
    columns = _columns(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class Results:
    """A folder of results. Without a folder, nothing is written.

    Args:
        folder: path of the folder, or "". Measures that an earlier command has written there stay, except those that this
            command repeats.
        description: what is measured: command, date, machine, setup.
    """

    def __init__(self, folder: str, description: dict[str, str]) -> None:
        self.folder, self.description = folder, description
        self.content: dict[str, Any] = {}
        if folder:
            os.makedirs(folder, exist_ok=True)
            if os.path.exists(self._path("results.json")):
                with open(self._path("results.json")) as stream:
                    self.content = json.load(stream)

    @property
    def title(self) -> str:
        """The description as text."""
        return "\n".join(f"{key}: {value}" for key, value in self.description.items())

    def add(self, measure: str, title: str, rows: list[dict[str, Any]], file: str) -> None:
        """Print the rows of a measure as a table, and write them to a file and to results.json."""
        text = table(rows)
        print(f"\n{title}\n{text}", flush=True)
        if not self.folder:
            return
        self.content[measure] = {**self.description, "rows": rows}
        self._write(file, comma_separated(rows) if file.endswith(".csv") else f"{self.title}\n\n{title}\n{text}\n")
        self._write("results.json", json.dumps(self.content, indent=1))

    def draw(self, name: str, chart: Any) -> None:
        """Write a chart as a picture and as an interactive page."""
        for ending in (".png", ".svg", ".html"):
            save(chart, self._path(name + ending))

    def _path(self, file: str) -> str:
        return os.path.join(self.folder, file)

    def _write(self, file: str, text: str) -> None:
        with open(self._path(file), "w") as stream:
            stream.write(text)

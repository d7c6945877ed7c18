"""Print tables, and write them to a folder of results: text, CSV, JSON and pictures."""

import csv
import io
import json
import os
from typing import Any

import charts

PARTS = ("parameters", "gradients", "state", "master", "buckets", "activations", "rest")
IN_BYTES = ("total", "predicted", "resident peak", *PARTS)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text. Bytes become MB. An empty line stands between groups with another first cell."""
    columns = [column for column in _columns(rows) if any(row.get(column) is not None for row in rows)]
    headings = [f"{column}, MB" if column in IN_BYTES else column for column in columns]
    cells = [headings, *([_cell(column, row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    has_names = isinstance(rows[0][columns[0]], str)
    lines = []
    for number, line in enumerate(cells):
        group = line[: columns.index("point")] if "point" in columns else []
        if number and group != cells[number - 1][: len(group)]:
            lines.append("")
        first = line[0].ljust(widths[0]) if has_names else line[0].rjust(widths[0])
        lines.append(
            "  ".join([first, *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]).rstrip()
        )
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
            return f"{value:+.1f}"
        return f"{value:.1f}" if column.endswith(", ms") or "MB" in column or column == "ms per step" else f"{value:.3f}"
    return str(value)


def comma_separated(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as CSV."""
    columns = _columns(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class Results:
    """A folder of results. Without a name, nothing is written.

    Args:
        folder: path of the folder, or "".
        description: what was measured: model, machine, command, date, versions.
    """

    def __init__(self, folder: str, description: dict[str, str]) -> None:
        self.folder = folder
        self.content: dict[str, Any] = dict(description)
        self.title = "\n".join(f"{key}: {value}" for key, value in description.items())
        if folder:
            os.makedirs(folder, exist_ok=True)

    def add(self, measure: str, rows: list[dict[str, Any]], file: str) -> None:
        """Print the rows of a measure as a table, and write them to a file and to results.json."""
        text = table(rows)
        print(f"\n{measure}\n{text}", flush=True)
        self.content[measure] = rows
        if not self.folder:
            return
        self._write(file, comma_separated(rows) if file.endswith(".csv") else f"{self.title}\n\n{measure}\n{text}\n")
        self._write("results.json", json.dumps(self.content, indent=1))

    def draw(self, name: str, chart: Any) -> None:
        """Write a chart as a picture and as an interactive page."""
        for ending in (".png", ".svg", ".html"):
            charts.save(chart, os.path.join(self.folder, name + ending))

    def _write(self, file: str, text: str) -> None:
        with open(os.path.join(self.folder, file), "w") as stream:
            stream.write(text)

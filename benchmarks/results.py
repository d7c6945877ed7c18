"""Tables of results, as text and JSON in a folder. The pictures are drawn from results.json:

$ python -m benchmarks.results results/gpt2*/      # draws all pictures again
"""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from charts.bars import memory_chart, time_chart, training_chart
from charts.style import MEMORY, save, table
from zero.checkpoint.files import atomic_write

IN_BYTES = ("total", "predicted", "peak", *MEMORY)  # the tables show them in MB
FORMS = {"largest difference": "{:.1g}", "ratio": "{:.3f}x", "ratio, quartiles": "{:.3f} to {:.3f}"}
HIDDEN = ("rounds, ms", "losses")  # in results.json only
CHARTS: dict[str, Callable[..., Any]] = {"memory": memory_chart, "time": time_chart, "training": training_chart}


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text. With a column "point", there is an empty line before each world size and mode."""
    shown = [column for column in dict.fromkeys(itertools.chain(*rows)) if column not in HIDDEN]
    columns = [column for column in shown if any(row.get(column) is not None for row in rows)]
    lines = [columns]
    for _, group in itertools.groupby(rows, key=lambda row: (row.get("world_size"), row.get("mode"))):
        lines += [[]] if "point" in columns else []
        lines += [[_cell(column, row.get(column)) for column in columns] for row in group]
    return table(lines)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column in FORMS:
        return FORMS[column].format(*value if isinstance(value, list) else [value])
    if column in IN_BYTES:
        return f"{value / 1e6:.1f}"
    if isinstance(value, float):
        is_rough = column.endswith(("%", ", ms")) or "MB" in column or column == "ms per step"
        return f"{round(value, 1) + 0:.1f}" if is_rough else f"{value:.3f}"  # no -0.0
    return str(value)


class Results:
    """A folder of results. Without a folder, nothing is written.

    Args:
        folder: path of the folder, or "". Measures that an earlier command has written there stay, except those that this
            command repeats.
        description: what is measured: command, date, machine, setup.
    """

    def __init__(self, folder: str, description: dict[str, str]) -> None:
        self.folder, self.description = folder and Path(folder), description
        self.title = "\n".join(f"{key}: {value}" for key, value in description.items())
        self.content: dict[str, Any] = {}
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (earlier := self.folder / "results.json").exists():
                self.content = json.loads(earlier.read_text())

    def add(self, measure: str, title: str, rows: list[dict[str, Any]], details: str = "") -> str:
        """Write the rows of a measure to <measure>.txt and results.json, and return them as text. `details` join the setup."""
        text = f"{title}\n{_table(rows)}"
        if self.folder:
            setup = ", ".join(filter(None, [self.description["setup"], details]))
            self.content[measure] = {**self.description, "setup": setup, "rows": rows}
            written = {f"{measure}.txt": f"{self.title}\n\n{text}\n", "results.json": json.dumps(self.content, indent=1)}
            for name, content in written.items():
                with atomic_write(str(self.folder / name)) as path:
                    Path(path).write_text(content)
        return text


def draw(folder: str) -> None:
    """Draw the pictures of a folder from its results.json."""
    content = json.loads(Path(folder, "results.json").read_text())
    for measure in content.keys() & CHARTS.keys():
        entry = content[measure]
        measured = f"{entry['setup']}; {entry['machine']}; {entry['date']}"
        for world_size in dict.fromkeys(row.get("world_size") for row in entry["rows"]):
            rows = [row for row in entry["rows"] if row.get("world_size") == world_size]
            ranks = f"rank 0 of {world_size}, " if world_size else ""
            path = Path(folder, f"{measure}{f'-{world_size}' if world_size else ''}.png")
            save(CHARTS[measure](rows, ranks + measured), str(path))


if __name__ == "__main__":
    for path in sys.argv[1:]:
        draw(path)

"""What all charts share: Altair, their style, the colours of the parts of memory, units, and how they are written to files.

The tables share the units, and how they are aligned.

Only `save` writes: style.save(bars.time_chart(rows, "GPT-2 124M"), "results/time.png")
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from zero.checkpoint.files import atomic_write


class _Altair:
    """Altair, which is an optional dependency and is imported at its first use."""

    def __getattr__(self, name: str) -> Any:
        try:
            import altair
            import PIL  # noqa: F401
            import vl_convert  # noqa: F401  Altair saves with it
        except ImportError as error:
            raise ImportError("pictures need altair and vl-convert-python; pip install -e '.[plots]'") from error
        return getattr(altair, name)


alt = _Altair()

# Column: name and colour of a purpose. The palette is that of Okabe and Ito, which the colour-blind can tell apart, and a grey.
MEMORY = {
    "parameters": ("parameters", "#0072B2"),
    "gradients": ("gradients", "#56B4E9"),
    "state": ("optimizer state", "#E69F00"),
    "master": ("master weights", "#F0E442"),
    "buckets": ("communication buffers", "#CC79A7"),
    "activations": ("activations", "#009E73"),
    "rest": ("temporary tensors", "#BBBBBB"),
    "copy": ("copy to save", "#777777"),
}
# the parameters of a chart: the colour of texts and ticks, and the runs that are highlighted; none: all of them
INK, PICKED = "ink", "picked"
PARAMS: list[dict[str, Any]] = [{"name": INK, "value": "black"}, {"name": PICKED, "value": []}]
NUMBER = ",.3~f"  # format of the numbers that appear under the mouse
FONT = "Helvetica, Arial, Liberation Sans, sans-serif"
_DASH = 10  # pixels of one colour where several lines are equal
CONFIG: dict[str, Any] = {
    "font": FONT,
    "background": "white",
    "padding": 10,
    "title": {
        "anchor": "start",
        "fontSize": 16,
        "subtitleFontSize": 13,
        "subtitleColor": "#444444",
        "subtitlePadding": 4,
        "offset": 8,
    },
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
    "axisX": {"tickCount": 5, "domain": False, "ticks": False, "gridColor": "#DDDDDD", "labelFlush": False},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6, "labelLimit": 240},
    "legend": {"orient": "top", "direction": "horizontal", "labelFontSize": 13, "symbolType": "square", "symbolSize": 150},
    "view": {"stroke": None},
}
_UNITS: dict[str, dict[str, float]] = {
    "MB": {"GB": 1000, "MB": 1},
    "bytes": {"GB": 1e9, "MB": 1e6, "kB": 1e3},
    "ms": {"s": 1000, "ms": 1},
    "s": {"s": 1, "ms": 0.001},
    "hours": {"days": 24, "hours": 1, "min": 1 / 60, "s": 1 / 3600},
    "tokens": {"B tokens": 1e9, "M tokens": 1e6, "tokens": 1},
}


def save(chart: Any, path: str) -> None:
    """Write a chart to a PNG file, and create its folder. A file that was there before stays until the new one is complete."""
    from PIL import Image

    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with atomic_write(path) as temporary:
        chart.save(temporary, format="png", scale_factor=2)
        with Image.open(temporary) as picture:  # vl-convert hardly compresses: a fourth of its bytes are enough
            picture.save(temporary, format="png")


def styled(chart: Any, text: str, **title: Any) -> Any:
    """Return the chart with a title, and with the fonts, colours and spacing that all charts share."""
    params = [alt.VariableParameter(**param) for param in PARAMS]
    return chart.properties(title=alt.TitleParams(text, **title), params=params).configure(**CONFIG)


def scale_of(looks: Mapping[Any, Any]) -> Any:
    """Return the scale in which each key has its colour or its dashes."""
    return alt.Scale(domain=list(looks), range=list(looks.values()))


def dashes(count: int) -> list[list[int]]:
    """Return the dashes of this many lines: where they lie on each other, their colours take turns."""
    return [[_DASH * (count - place), _DASH * place] for place in range(count)]


def opacity(opaque: float = 1) -> Any:
    """Return the encoding with which a run fades when others are highlighted."""
    picked = f"!{PICKED}.length || indexof({PICKED}, datum.run) >= 0"
    return alt.when(picked).then(alt.value(opaque)).otherwise(alt.value(0.08))


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def shown_in(unit: str, largest: float) -> tuple[float, str]:
    """Return what to divide by, and the unit then: one in which the largest amount is neither long nor 0.00355."""
    units = _UNITS.get(unit, {unit: 1})
    name = next((name for name, divisor in units.items() if largest >= divisor), list(units)[-1])
    return units[name], name


def number(value: float) -> str:
    """Return a value with three digits, such as 1.82, 24.1 or 1,817."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:#.3g}"


def with_unit(value: float, unit: str) -> str:
    """Return a value with its unit, such as 1.82 GB for 1820 MB."""
    divisor, name = shown_in(unit, abs(value))
    return f"{number(value / divisor)} {name}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as text, the names of the columns first: all but `mode` on the right. `[]` is an empty line."""
    columns = lines[0]
    widths = [max(map(len, column)) for column in zip(*filter(None, lines), strict=True)]
    text = []
    for line in lines:
        cells = zip(columns, line, widths, strict=False)
        aligned = (cell.ljust(width) if name == "mode" else cell.rjust(width) for name, cell, width in cells)
        text.append("  ".join(aligned).rstrip())
    return "\n".join(text)

"""Bars of tqdm at the bottom of a terminal that show how far a run is. To a file or a pipe, they write nothing."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tqdm import tqdm

from distributed.watchdog import position

# metrics that the bar of the run shows, in this order
_FIGURES = {"iter/loss": "loss {:.4f}", "throughput/tokens_per_second": "{:,.0f} tok/s", "memory/peak_mb": "{:,.0f} MB"}
_COUNTED = "{desc} {n}/{total} |{bar}| {remaining} left{postfix}"


class Progress:
    """A bar for the run up to its last iteration, `total`, and one for a part of it that takes long. Only rank 0 draws.

    `distributed.ranks.print0` prints above the bars; what anything else prints begins behind a bar.
    """

    def __init__(self, total: int, rank: int) -> None:
        self._total = total
        disable = True if rank > 0 else None  # None: draw on a terminal only
        self._bar = partial(tqdm, file=sys.stdout, disable=disable, leave=False, dynamic_ncols=True)
        self._run: tqdm | None = None

    def update(self, iteration: int, figures: dict[str, Any]) -> None:
        """Show that this iteration has ended, and some of the latest metrics, given by key."""
        if self._run is None:  # the first iteration is not typical; the remaining time is estimated from the others
            self._run = self._bar(desc="iter", total=self._total, initial=iteration, bar_format=_COUNTED)
        texts = [text.format(figures[key]) for key, text in _FIGURES.items() if key in figures]
        self._run.set_postfix_str(", ".join(texts), refresh=False)
        self._run.update(iteration - self._run.n)

    @contextmanager
    def task(self, description: str, total: int | None = None) -> Iterator[tqdm]:
        """Show a part of the run that takes long. `update` of the yielded bar counts up to `total`."""
        form = "{desc} {elapsed}" if total is None else _COUNTED
        with position.at(description), self._bar(desc=description, total=total, bar_format=form) as bar:
            yield bar

    def track(self, items: Sequence[Any], description: str) -> Iterator[Any]:
        """Yield the items, and show how many have been worked on."""
        with self.task(description, len(items)) as bar:
            for item in items:
                yield item
                bar.update()
                position.move()

    def close(self) -> None:
        """Remove the bar of the run."""
        if self._run is not None:
            self._run.close()

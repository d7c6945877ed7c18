"""Where metrics go beside metrics.jsonl, by a library that may fail: the training goes on without it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from distributed.ranks import print0


class Output:
    """A library that shows metrics, on rank 0. On other ranks, and if it is not asked for, its methods do nothing."""

    name: str  # of the library
    sink: Any = None  # its object that takes the metrics; None: there is none, or it has failed


def while_it_works(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method of an `Output` that does nothing without its sink. If it raises, a line says so, and the sink is gone."""

    @wraps(method)
    def call(output: Output, *arguments: Any) -> None:
        if output.sink is not None:
            try:
                method(output, *arguments)
            except Exception as error:
                output.sink = None
                print0(f"WARNING: {output.name} has stopped: {first_line(error)}; metrics.jsonl has all figures")

    return call


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if there is no message."""
    return str(error).partition("\n")[0] or type(error).__name__

"""The commands `inspect` and `compare`."""

import argparse
import math
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from zero.checkpoint.compare import compare
from zero.checkpoint.format import NAME, load, verify
from zero.checkpoint.state import CheckpointError

_SHOWN = 10  # differences


def _inspect(path: str) -> int:
    """Verify the checksums of a file, and print its content."""
    verify(path)
    checkpoint = load(path)
    by = "zero.checkpoint" if "format" in checkpoint else "nanoGPT" if "model_args" in checkpoint else "another program"
    print(f"{path}: all checksums match; {os.path.getsize(path) / 1e6:.1f} MB, written by {by}")
    state = checkpoint.get("optimizer", {"state": {}})["state"]
    print(f"{len(checkpoint['model'])} weights (tied ones by each of their names), optimizer state of {len(state)} parameters")
    for key in sorted(checkpoint.keys() - {"model", "optimizer", "config", "manifest"}):  # older files have a manifest
        print(f"{key} {checkpoint[key]}")
    return 0


def _compare(path: str, other: str, tolerance: float) -> int:
    """Print the differences of two checkpoints, the largest first, steps last. Return 1 if one is larger than the tolerance."""
    found = compare(path, other)
    of_state = sum(each.name.startswith("optimizer.") for each in found)
    counts = f"{len(found) - of_state} weights and {of_state} entries of optimizer state"
    different = [each for each in found if not each.is_identical]
    different.sort(key=lambda each: (each.name.endswith(".step"), -each.largest))  # counters say little
    if not different:
        print(f"bit-identical: {counts}")
        return 0
    first, largest = different[0].largest, max(each.largest for each in different)
    judged = f"{'within' if largest <= tolerance else 'more than'} the tolerance of {tolerance:g}"
    steps = f" (and {largest:.3g} steps)" if largest > first else ""
    print(f"{len(different)} differ{'' if math.isinf(largest) else f' by at most {first:.3g}{steps}, {judged}'}, of {counts}:")
    for each in different[:_SHOWN]:
        print(f"  {each.why or f'{each.largest:<9.3g}'}  {each.name}")
    if len(different) > _SHOWN:
        print(f"  and {len(different) - _SHOWN} more")
    return int(largest > tolerance)


def _path(name: str) -> str:
    """Return the newest checkpoint of a folder, or the file itself."""
    return os.path.join(name, NAME) if os.path.isdir(name) else name


def _tolerance(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(arguments: list[str]) -> int:
    """Run a command, and return the exit code; --help and wrong arguments end the process."""
    parser = _Parser("python -m zero.checkpoint", description="Look at a checkpoint, or compare two.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect | compare")
    about = "verify the checksums of a checkpoint, and say what it contains"
    command = commands.add_parser("inspect", help=about, description=about, allow_abbrev=False)
    command.add_argument("file", metavar="FILE", type=_path, help="a checkpoint or a folder with a ckpt.pt, also nanoGPT's")
    about = "compare weights and optimizer state of two checkpoints, the largest difference first"
    exit_codes = "exit code 0, or 1 if a difference is larger than the tolerance, or 2 if a file cannot be read"
    command = commands.add_parser("compare", help=about, description=f"{about}; {exit_codes}", allow_abbrev=False)
    command.add_argument("first", metavar="A", type=_path, help="a checkpoint, or a folder with one, as for inspect")
    command.add_argument("second", metavar="B", type=_path, help="another one, of any implementation and number of ranks")
    command.add_argument("--tolerance", type=_tolerance, default=0.0, help="largest absolute difference; default: 0")
    args = parser.parse_args(arguments)
    try:
        return _inspect(args.file) if args.command == "inspect" else _compare(args.first, args.second, args.tolerance)
    except CheckpointError as error:
        sys.stderr.write(f"error: {error}\n")
    except OSError as error:
        sys.stderr.write(f"error: cannot write the output: {error.strerror or error}\n")
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of the output may exit early, like `head`
    sys.exit(main(sys.argv[1:]))

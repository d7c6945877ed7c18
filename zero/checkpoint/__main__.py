"""The command `inspect`."""

import argparse
import os
import signal
import sys
from typing import NoReturn

from zero.checkpoint.format import KEYS, load, verify
from zero.checkpoint.state import CheckpointError


def _inspect(path: str) -> None:
    """Verify the checksums of a file, and print its content."""
    verify(path)
    checkpoint = load(path)
    by = "this program" if "format" in checkpoint else "nanoGPT"
    print(f"{path}: all checksums match; {os.path.getsize(path) / 1e6:.1f} MB, written by {by}")
    if missing := sorted(KEYS.keys() - checkpoint.keys()):
        print(f"without {', '.join(missing)}")
    else:
        print(f"iteration {checkpoint['iter_num']}, best validation loss {float(checkpoint['best_val_loss']):.4f}")
    for key in ["model_args", *sorted(checkpoint.keys() - KEYS.keys() - {"manifest"})]:  # older files have one
        print(f"{key} {checkpoint[key]}")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(arguments: list[str]) -> int:
    """Run the command `inspect`, and return the exit code; --help and wrong arguments end the process."""
    parser = _Parser("python -m zero.checkpoint", description="Look at a checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect")
    about = "verify the checksums of a checkpoint, and say what it contains"
    command = commands.add_parser("inspect", help=about, description=about)
    command.add_argument("file", metavar="FILE", help="a checkpoint, such as out/ckpt.pt")
    args = parser.parse_args(arguments)
    try:
        _inspect(args.file)
        return 0
    except CheckpointError as error:
        sys.stderr.write(f"error: {error}\n")
    except OSError as error:
        sys.stderr.write(f"error: cannot write the output: {error.strerror or error}\n")
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of the output may exit early, like `head`
    sys.exit(main(sys.argv[1:]))

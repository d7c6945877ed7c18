"""The commands `inspect` and `convert`."""

import argparse
import os
import signal
import sys
from typing import NoReturn

from zero.checkpoint.format import KEYS, read_file, verify
from zero.checkpoint.state import CheckpointError
from zero.checkpoint.store import FORMATS, convert


def _inspect(path: str) -> None:
    """Verify the checksums of a file, and print its content."""
    verify(path)
    checkpoint = read_file(path)
    kind = FORMATS["shards" in checkpoint] if "format" in checkpoint else "written by nanoGPT"
    print(f"{path}: all checksums match; {os.path.getsize(path) / 1e6:.1f} MB, {kind}")
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
    """Run the command `inspect` or `convert`, and return the exit code; --help and wrong arguments end the process."""
    parser = _Parser("python -m zero.checkpoint", description="Look at a checkpoint, or change its format.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect | convert")
    about = "verify the checksums of a checkpoint and of its shards, and say what it contains"
    command = commands.add_parser("inspect", help=about, description=about)
    command.add_argument("file", metavar="FILE", help="a checkpoint, such as out/ckpt.pt")
    about = "write a checkpoint to a new file, in one file (consolidated) or with a folder of shards (sharded)"
    command = commands.add_parser("convert", help=about, description=about)
    command.add_argument("file", metavar="FILE", help="a checkpoint, such as out/ckpt.pt; it stays as it is")
    command.add_argument("new_file", metavar="NEW_FILE", help="a name that ends in .pt and does not exist")
    formats = "the new format, as for checkpoint_format of train.py; by default the one that FILE does not have"
    command.add_argument("--to", choices=FORMATS, help=formats)
    args = parser.parse_args(arguments)
    try:
        if args.command == "inspect":
            _inspect(args.file)
        else:
            print(f"{args.new_file}: {convert(args.file, args.new_file, args.to)}")
        return 0
    except CheckpointError as error:
        sys.stderr.write(f"error: {error}\n")
    except OSError as error:
        where = vars(args).get("new_file", "the output")
        sys.stderr.write(f"error: cannot write {where}: {error.strerror or error}; choose a folder that can be written to\n")
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of the output may exit early, like `head`
    sys.exit(main(sys.argv[1:]))

"""The commands `inspect` and `convert`."""

import argparse
import os
import signal
import sys
from typing import NoReturn

from zero.checkpoint.format import FORMAT, KEYS, manifest_entry, named_tensors, read_file, shards_folder, verify
from zero.checkpoint.state import CheckpointError
from zero.checkpoint.store import FORMATS, convert


def _inspect(path: str, show_tensors: bool) -> bool:
    """Print whether the checksums of a file are correct, then its content. Return whether they are."""
    verify(path)
    checkpoint = read_file(path)
    manifest, tensors = checkpoint.get("manifest", {}), named_tensors(checkpoint)
    wrong = {name for name in tensors.keys() & manifest.keys() if manifest[name] != manifest_entry(tensors[name])}
    different = sorted(wrong | (manifest.keys() ^ tensors.keys() if manifest else set()))
    sound = "all checksums hold" if manifest else "it has only the checksums of the archive, which hold"
    elements = sum(tensor.numel() for tensor in tensors.values())
    kind = f"{FORMATS['shards' in checkpoint]}, format {FORMAT}" if manifest else "written by nanoGPT"
    print(f"{path}: {f'WRONG: {different}' if different else sound}")
    print(f"{os.path.getsize(path) / 1e6:.1f} MB, {kind}; {len(tensors)} tensors, {elements / 1e6:.1f}M numbers")
    print(f"iteration {checkpoint['iter_num']}, best validation loss {float(checkpoint['best_val_loss']):.4f}")
    print(f"model_args {checkpoint['model_args']}")
    for key in sorted(checkpoint.keys() - KEYS.keys() - {"manifest", "shards"}):
        print(f"{key} {checkpoint[key]}")
    if "shards" in checkpoint:
        sizes = [nbytes for nbytes, _ in checkpoint["shards"]["files"].values()]
        print(f"{len(sizes)} files with a checksum each, {sum(sizes) / 1e6:.1f} MB in {shards_folder(path, checkpoint)}")
    for name, tensor in tensors.items() if show_tensors else ():
        dtype = str(tensor.dtype).removeprefix("torch.")
        print(f"  {name} {tuple(tensor.shape)} {dtype}{' WRONG CHECKSUM' if name in wrong else ''}")
    return not different


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(arguments: list[str]) -> int:
    """Run the command `inspect` or `convert`, and return the exit code; --help and wrong arguments end the process."""
    parser = _Parser("python -m zero.checkpoint", description="Look at a checkpoint, or change its format.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect | convert")
    about = "say whether the checksums of a checkpoint hold, and what it contains; exit code 1 if one does not"
    command = commands.add_parser("inspect", help=about, description=about)
    command.add_argument("file", metavar="FILE", help="a checkpoint, such as out/ckpt.pt")
    command.add_argument("--tensors", action="store_true", help="also list name, shape and dtype of every tensor")
    about = "write a checkpoint to a new file, in one file (consolidated) or with a folder of shards (sharded)"
    command = commands.add_parser("convert", help=about, description=about)
    command.add_argument("file", metavar="FILE", help="a checkpoint, such as out/ckpt.pt; it stays as it is")
    command.add_argument("new_file", metavar="NEW_FILE", help="a name that ends in .pt and does not exist")
    formats = "the new format, as for checkpoint_format of train.py; by default the one that FILE does not have"
    command.add_argument("--to", choices=FORMATS, help=formats)
    args = parser.parse_args(arguments)
    try:
        if args.command == "inspect":
            return 0 if _inspect(args.file, args.tensors) else 1
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

"""The commands `inspect` and `convert`."""

import os
import signal
import sys

from zero.checkpoint import format
from zero.checkpoint.format import FORMAT, KEYS, manifest_entry, tensors_in
from zero.checkpoint.store import FORMATS, convert, shards_folder, verify
from zero.state import CheckpointError


def _inspect(path: str) -> bool:
    """Print the content of a file. Returns whether its checksums are correct."""
    verify(path)
    checkpoint = format.read(path)
    manifest, tensors = checkpoint.get("manifest", {}), tensors_in(checkpoint)
    kind = f"{FORMATS['shards' in checkpoint]}, format {FORMAT}" if manifest else "written by nanoGPT"
    print(f"{path}: {os.path.getsize(path) / 1e6:.1f} MB, {kind}")
    print(f"iteration {checkpoint['iter_num']}, best validation loss {float(checkpoint['best_val_loss']):.4f}")
    print(f"model_args {checkpoint['model_args']}")
    for key in sorted(checkpoint.keys() - KEYS.keys() - {"manifest", "shards"}):
        print(f"{key} {checkpoint[key]}")
    if "shards" in checkpoint:
        sizes = [nbytes for nbytes, _ in checkpoint["shards"]["files"].values()]
        print(f"{len(sizes)} files with a checksum each, {sum(sizes) / 1e6:.1f} MB in {shards_folder(path, checkpoint)}")
    wrong = sorted(manifest.keys() ^ tensors.keys()) if manifest else []
    for name, tensor in tensors.items():
        entry = manifest.get(name)
        holds = entry is None or entry == manifest_entry(tensor)
        if not holds:
            wrong.append(name)
        print(f"  {name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{'' if holds else ' WRONG CHECKSUM'}")
    elements = sum(tensor.numel() for name, tensor in tensors.items())
    sound = "all checksums hold" if manifest else "it has only the checksums of the archive, which hold"
    print(f"{len(tensors)} tensors, {elements / 1e6:.1f}M numbers; {sound if not wrong else f'wrong: {wrong}'}")
    return not wrong


def main(arguments: list[str]) -> int:
    """Run the command `inspect` or `convert`. Returns the exit code."""
    try:
        match arguments:
            case ["inspect", path]:
                return 0 if _inspect(path) else 1
            case ["convert", source, target]:
                print(f"{target}: {convert(source, target)}")
                return 0
            case _:
                raise CheckpointError("usage: python -m zero.checkpoint inspect FILE, or convert FILE NEW_FILE")
    except CheckpointError as error:
        sys.stderr.write(f"error: {error}\n")
    except OSError as error:
        sys.stderr.write(
            f"error: cannot write {arguments[-1]}: {error.strerror or error}; choose a folder that can be written to\n"
        )
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of the output may exit early, like `head`
    sys.exit(main(sys.argv[1:]))

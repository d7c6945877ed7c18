"""Files as `torch.save` writes them, written piece by piece: the tensors of a file are never in memory together.

A file is a zip archive: a pickle, in which a tensor names its entry, and an entry with the elements of each tensor. The archive
has a CRC-32 of every entry. Source: https://pytorch.org/docs/stable/notes/serialization.html
"""

import itertools
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterable
from typing import IO, Any, NamedTuple

import torch

from zero.tensors import flattened, is_dense

_ALIGNMENT = 64  # bytes: the elements of an entry begin at a multiple of it in the file, which may be memory-mapped
_HEADER = 30 + 20 + 4  # bytes before the padding of an entry, besides its name: fields, 64-bit sizes, mark of the padding
_PADDING = 0x4246  # this mark, as torch writes it

# tensors on the meta device, one after the other, with their next elements, flat, on the CPU
Pieces = Iterable[tuple[torch.Tensor, torch.Tensor]]


class _Storage(NamedTuple):
    """How a pickle refers to the memory of a tensor."""

    kind: Any
    key: str  # of the entry
    numel: int  # of the units of this kind


class _Pickler(pickle.Pickler):
    """Pickles tensors as `torch.save` does. Those on the meta device will be read as tensors on the CPU."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.keys: dict[Any, str] = {}  # of the entries of tensors, by `place_of`
        self.nbytes: dict[str, int] = {}  # of these entries
        self.tensors: list[torch.Tensor] = []  # those that have elements

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if place_of(value) not in self.keys:
            self.keys[place_of(value)] = key = str(len(self.keys))
            self.nbytes[key] = value.numel() * value.itemsize
            self.tensors += [] if value.is_meta else [value]
        rebuild, (storage, _, _, _, *others) = torch.empty(0, dtype=value.dtype).__reduce_ex__(2)
        is_typed = isinstance(storage, torch.storage.TypedStorage)
        kind = getattr(torch, storage._pickle_storage_type()) if is_typed else torch.UntypedStorage
        memory = _Storage(kind, self.keys[place_of(value)], value.numel() * (1 if is_typed else value.itemsize))
        strides = value.stride() if is_dense(value) else torch.empty(value.shape, device="meta").stride()
        return rebuild, (memory, 0, tuple(value.shape), strides, *others)

    def persistent_id(self, value: Any) -> Any:
        return ("storage", value.kind, value.key, "cpu", value.numel) if isinstance(value, _Storage) else None


def write_archive(tree: Any, path: str, pieces: Pieces = ()) -> None:
    """Write nested dicts and lists to the disk, so that `torch.load` reads them.

    `pieces`: of the tensors of `tree` on the meta device. Raises ValueError if they do not fill these.
    """
    with open(path, "wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            with _entry(archive, "data.pkl") as entry:
                pickler = _Pickler(entry)
                pickler.dump(tree)
            for name, text in (("byteorder", sys.byteorder), ("version", "3\n")):
                with _entry(archive, name) as entry:
                    entry.write(text.encode())
            others = ((tensor, flattened(tensor.detach(), tensor)) for tensor in pickler.tensors)
            of_entries = itertools.groupby(itertools.chain(pieces, others), lambda piece: pickler.keys[place_of(piece[0])])
            written: dict[str, int] = {}
            for key, of_entry in of_entries:
                with _entry(archive, f"data/{key}") as entry:
                    written[key] = sum(entry.write(_bytes(elements)) for _, elements in of_entry)
            if written != pickler.nbytes:
                raise ValueError(f"{path}: the pieces are not the elements of the tensors")
        file.flush()
        os.fsync(file.fileno())


def _entry(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """Begin an entry of an archive."""
    info = zipfile.ZipInfo(f"archive/{name}")
    padding = -(archive.start_dir + _HEADER + len(info.filename)) % _ALIGNMENT
    info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
    return archive.open(info, "w", force_zip64=True)


def _bytes(elements: torch.Tensor) -> memoryview:
    return elements.cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().data


def place_of(tensor: torch.Tensor) -> Any:
    """Return what is the same for tied tensors, and different for others."""
    has_own = tensor.is_meta or not tensor.numel()
    return id(tensor) if has_own else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)

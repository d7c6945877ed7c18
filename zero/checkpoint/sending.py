"""A checkpoint for ranks that do not see its file, for example on hosts without a shared disk: rank 0 sends it to them.

Such a rank receives the plain values and the shapes of all tensors. In `restore`, rank 0 sends it the optimizer state of its
own slices, and nothing else: with plain AdamW this is the whole state, because every rank holds it. No weights are sent,
because every implementation broadcasts those of rank 0 when it wraps the model.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero.checkpoint.format import chunk_reader, load, named_tensors, verify
from zero.checkpoint.state import CheckpointError, TensorChunk, map_leaves
from zero.host_comm import MESSAGE_BYTES, Transfers, broadcast_object, cpu_group, gather_objects, is_rank_0

_ReadChunks = Callable[[list[TensorChunk]], None]


class _Identity(NamedTuple):
    """What identifies a checkpoint file without reading its tensors."""

    content: str  # hash of the names, sizes and CRC-32s of the entries of the archive
    file: tuple[int, int]  # inode and time of the last change: equal on all hosts that share the file, not in a copy


def load_on_all_ranks(path: str) -> tuple[dict[str, Any], _ReadChunks | None]:
    """Load rank 0's checkpoint, also on ranks that do not see its file. Needs to be called on all ranks.

    If every rank sees the file, this is `load` and `chunk_reader`. A rank with another file, with a damaged copy or without a
    file gets the checkpoint from rank 0. There, the optimizer state is on the meta device, and all weights are zero: wrap the
    model with `zero.build.build`, which broadcasts the weights of rank 0.

    Returns:
        The checkpoint, and the function with which `restore` reads its optimizer state, or None. If a rank does not see the
        file, the function needs to be called on all ranks.

    Raises:
        CheckpointError: on all ranks, if rank 0 cannot read the checkpoint.
    """
    group = cpu_group(None) if dist.is_initialized() else None
    own = _identity(path)
    of_rank_0 = broadcast_object(own, group)
    checkpoint: dict[str, Any] = {}
    error = None
    try:
        if is_rank_0() or _is_same(path, own, of_rank_0):
            checkpoint = load(path)
    except CheckpointError as raised:
        error = raised
    receivers = [rank for rank, sees in enumerate(gather_objects(bool(checkpoint), group)) if not sees]
    if 0 in receivers:
        raise broadcast_object(error, group)
    read_chunks = chunk_reader(path, checkpoint) if checkpoint else None
    if not receivers:
        return checkpoint, read_chunks
    outline = broadcast_object(_outline(checkpoint) if is_rank_0() else None, group)
    if not checkpoint:
        return outline, partial(_read_or_receive, None)
    return checkpoint, partial(_read_or_receive, read_chunks or partial(_copy, checkpoint["optimizer"]["state"]))


def _identity(path: str) -> _Identity | None:
    """Return the identity of a file, or None if it cannot be read."""
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
            status = os.fstat(file.fileno())
    except Exception:  # damaged bytes can raise any error
        return None
    return _Identity(hashlib.sha256(repr(entries).encode()).hexdigest(), (status.st_ino, status.st_mtime_ns))


def _is_same(path: str, own: _Identity | None, other: _Identity | None) -> bool:
    """Return whether this rank's file is rank 0's file, or a copy of it. Reads every byte of a copy, which may be damaged."""
    if own is None or other is None or own.content != other.content:
        return False
    if own.file != other.file:
        verify(path)
    return True


def _outline(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with zero weights, which share one element, and with optimizer state on the meta device."""

    def has_elements(held: Any) -> bool:
        return isinstance(held, torch.Tensor) and held.dim() > 0

    model = {
        name: torch.zeros((), dtype=held.dtype).expand(held.shape) if has_elements(held) else held
        for name, held in checkpoint["model"].items()
    }
    state = map_leaves(
        lambda _, held: torch.empty_like(held, device="meta") if has_elements(held) else held, checkpoint["optimizer"]["state"]
    )
    return {**checkpoint, "model": model, "optimizer": {**checkpoint["optimizer"], "state": state}}


def _read_or_receive(read_chunks: _ReadChunks | None, own: list[TensorChunk]) -> None:
    """Fill the elements of `own`: ranks that see the file read them, the other ranks receive them from rank 0.

    Needs to be called on all ranks. Rank 0 sends some chunks, about `MESSAGE_BYTES` or a single larger one, to each receiver,
    then the next ones to each, and so on, so that no rank waits for long.

    Args:
        read_chunks: fills the elements of chunks; None if this rank does not see the file.
    """
    group = cpu_group(None)
    asked = gather_objects(_allocate(own, "meta") if read_chunks is None else [], group)
    error = _read(read_chunks, own)
    transfers = Transfers(group)
    for chunk in own if read_chunks is None else ():
        transfers.receive(chunk.elements, 0)
    for parts in zip_longest(*map(_in_parts, asked), fillvalue=[]) if is_rank_0() else ():
        for rank, wanted in enumerate(parts):
            part = _allocate(wanted, "cpu")
            error = error or _read(read_chunks, part)  # after an error, the receivers still wait for their elements
            for chunk in part:
                transfers.send(chunk.elements, rank)
    transfers.wait()
    if error := next(filter(None, gather_objects(error, group)), None):
        raise error


def _allocate(chunks: list[TensorChunk], device: str) -> list[TensorChunk]:
    """Return the same chunks with uninitialized elements."""
    return [chunk._replace(elements=torch.empty_like(chunk.elements, device=device)) for chunk in chunks]


def _read(read_chunks: _ReadChunks | None, chunks: list[TensorChunk]) -> CheckpointError | None:
    """Fill the elements of `chunks`, if this rank sees the file. Return the error if the file cannot be read."""
    try:
        if read_chunks is not None and chunks:
            read_chunks(chunks)
    except CheckpointError as error:
        return error
    return None


def _copy(state: dict[int, dict[str, Any]], chunks: list[TensorChunk]) -> None:
    """Fill the elements of `chunks` from the optimizer state of a consolidated checkpoint."""
    tensors = named_tensors(state, "optimizer.state")
    for chunk in chunks:
        chunk.elements.copy_(tensors[chunk.name].reshape(-1)[chunk.start : chunk.stop])


def _in_parts(chunks: list[TensorChunk]) -> list[list[TensorChunk]]:
    """Divide a list of chunks into lists of about `MESSAGE_BYTES`, each of which is read at once."""
    parts: list[list[TensorChunk]] = []
    free_bytes = 0
    for chunk in chunks:
        if free_bytes <= 0:
            parts.append([])
            free_bytes = MESSAGE_BYTES
        parts[-1].append(chunk)
        free_bytes -= chunk.elements.nbytes
    return parts

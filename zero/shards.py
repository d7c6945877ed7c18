"""A checkpoint's tensors in pieces: every rank writes those it has, any other ranks read the parts they need.

The files are those of torch.distributed.checkpoint, whose planners decide what goes where. A tensor is stored flat, and
its pieces are whatever ranges of elements the ranks had of it. What torch.distributed.checkpoint would unpickle without
looking is read here by an unpickler that admits its own records only.
"""

import os
import pickle
import re
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

# what is meant here, and needs no warning
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_METADATA = ".metadata"
_READ_BYTES = 16_000_000
_RECORDS = (
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
)
_ADMITTED = {(record.__module__, record.__qualname__): record for record in _RECORDS}
_ADMITTED["torch.serialization", "_get_layout"] = torch.serialization._get_layout  # how a torch.layout is pickled


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not belong to this model; the message names the file or the entry."""


class Piece(NamedTuple):
    """Elements `start:start + len(elements)` of one flattened tensor of the checkpoint."""

    name: str
    numel: int  # of the whole tensor
    start: int
    elements: torch.Tensor  # (stop - start,)

    @classmethod
    def of_whole(cls, name: str, tensor: torch.Tensor) -> Self:
        """All of a tensor, as one piece."""
        return cls(name, tensor.numel(), 0, tensor.detach().reshape(-1))

    @property
    def index(self) -> metadata.MetadataIndex:
        return metadata.MetadataIndex(self.name, [self.start])

    @property
    def chunk(self) -> metadata.ChunkStorageMetadata:
        return metadata.ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.elements.numel()]))


class FileSum(NamedTuple):
    """What a file must be like to be whole."""

    nbytes: int
    crc32: int


def write(pieces: list[Piece], folder: str, process_group: dist.ProcessGroup | None) -> dict[str, FileSum]:
    """Write each rank's pieces, and have them on the disk. Needs to be called on all ranks of the group; None: alone.

    Together the pieces must cover every tensor once.

    Returns:
        Name and checksum of each file that this rank wrote into `folder`.

    Raises:
        OSError: on all ranks, if one of them cannot write.
    """
    writer = _Writer(folder)
    try:
        dcp.save(
            {},
            storage_writer=writer,
            planner=_SavePlanner(_with_elements(pieces)),
            process_group=process_group,
            no_dist=process_group is None,
        )
    except dcp.api.CheckpointException as failed:  # a BaseException
        rank, (error, _) = next(iter(failed.failures.items()))
        if isinstance(error, OSError):
            raise OSError(f"rank {rank} cannot write to {folder}: {error}") from failed
        raise error from failed
    return writer.sums


def read(folder: str, pieces: list[Piece]) -> None:
    """Fill the elements of `pieces`, whoever wrote them and however they were cut. Any rank alone.

    Raises:
        CheckpointError: if the files are missing, damaged, or not of these tensors.
    """
    pieces = _with_elements(pieces)
    try:
        reader = _Reader(folder)
        stored = reader.metadata.state_dict_metadata
        for piece in pieces:
            if piece.name not in stored or tuple(stored[piece.name].size) != (piece.numel,):
                raise CheckpointError(f"{folder} has no tensor {piece.name} of {piece.numel} elements")
        dcp.load({}, storage_reader=reader, planner=_LoadPlanner(pieces), no_dist=True)
    except CheckpointError:
        raise
    except dcp.api.CheckpointException as failed:  # a BaseException
        raise CheckpointError(damaged(folder, next(iter(failed.failures.values()))[0])) from failed
    except Exception as error:  # whatever damaged bytes provoke
        raise CheckpointError(damaged(folder, error)) from error


def damaged(path: str, reason: object) -> str:
    """One line on a file, or a folder, that cannot be read."""
    refused = re.search(r"GLOBAL ([\w.]+)", str(reason))
    if refused:
        return f"{path} asks for {refused[1]}; a checkpoint holds tensors and plain values only, so nothing of it was run"
    lines = [line for line in str(reason).splitlines() if line and not line.startswith("Weights only load failed")]
    return f"{path} is damaged, or not a checkpoint: {lines[0] if lines else type(reason).__name__}"


def damage(folder: str, sums: dict[str, FileSum]) -> str | None:
    """What is wrong with the files of a folder, if anything; reads every byte."""
    paths = [os.path.join(folder, name) for name in sums]
    for path, (nbytes, _) in zip(paths, sums.values(), strict=True):
        if not os.path.exists(path):
            return f"there is no {path}"
        if os.path.getsize(path) != nbytes:
            return f"{path} has {os.path.getsize(path)} bytes instead of {nbytes}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for path, found, expected in zip(paths, pool.map(_file_sum, paths), sums.values(), strict=True):
                if found != expected:
                    return f"the checksum of {path} does not hold"
        except OSError as error:
            return str(error)
    return None


def of_the_disk(error: RuntimeError) -> Exception:
    """What a file said when torch's zip writer failed on it, if that is why it failed."""
    reason = error
    while reason is not None and not isinstance(reason, OSError):
        reason = reason.__context__
    return reason or error


def sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans to write pieces in place of a state dict."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self.pieces = {piece.index: piece for piece in pieces}

    def create_local_plan(self) -> planner.SavePlan:
        self.plan = planner.SavePlan([self._write_item(piece) for piece in self.pieces.values()])
        return self.plan

    def lookup_object(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self.pieces[index].elements

    @staticmethod
    def _write_item(piece: Piece) -> planner.WriteItem:
        properties = metadata.TensorProperties.create_from_tensor(piece.elements)
        data = planner.TensorWriteData(piece.chunk, properties, torch.Size([piece.numel]))
        return planner.WriteItem(piece.index, planner.WriteItemType.SHARD, tensor_data=data)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans to read pieces in place of a state dict."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self.pieces = {piece.index: piece for piece in pieces}

    def create_local_plan(self) -> planner.LoadPlan:
        stored = self.metadata.state_dict_metadata
        items = []
        for piece in self.pieces.values():
            items += create_read_items_for_chunk_list(piece.name, stored[piece.name], [piece.chunk])
        return planner.LoadPlan(items)

    def lookup_tensor(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self.pieces[index].elements


class _Writer(dcp.FileSystemWriter):
    """Keeps the checksums of what this rank writes."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # whose stream would be another GPU's in a thread
        self.sums: dict[str, FileSum] = {}

    def storage_meta(self) -> None:
        """Nothing: it would be a path of this machine, in a class that other versions of Python call otherwise."""

    def write_data(self, plan: planner.SavePlan, planner: planner.SavePlanner) -> torch.futures.Future:
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            raise of_the_disk(error) from error
        for name in {result.storage_data.relative_path for result in written.wait()}:
            self.sums[name] = _file_sum(os.path.join(self.path, name))
        return written

    def finish(self, metadata: metadata.Metadata, results: list[Any]) -> None:
        super().finish(metadata, results)
        self.sums[_METADATA] = _file_sum(os.path.join(self.path, _METADATA))
        sync_folder(self.path)


class _Reader(dcp.FileSystemReader):
    """Reads the table of contents with nothing in it run."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        with open(os.path.join(folder, _METADATA), "rb") as file:
            self.metadata = _Unpickler(file).load()

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self.metadata


class _Unpickler(pickle.Unpickler):
    """Admits the records of torch.distributed.checkpoint and plain values."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return self._memory_format
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not admitted")
        return _ADMITTED[module, name]

    @staticmethod
    def _memory_format(kind: type, name: str) -> metadata._MEM_FORMAT_ENCODING:
        """In place of getattr, by which Python 3.11 pickles an Enum before 3.11.4."""
        if kind is not metadata._MEM_FORMAT_ENCODING:
            raise pickle.UnpicklingError("GLOBAL builtins.getattr is not admitted")
        return metadata._MEM_FORMAT_ENCODING[name]


def _with_elements(pieces: list[Piece]) -> list[Piece]:
    """Of tensors that have no elements nothing is written."""
    return [piece for piece in pieces if piece.elements.numel()]


def _file_sum(path: str) -> FileSum:
    nbytes = crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            nbytes += len(block)
            crc32 = zlib.crc32(block, crc32)
    return FileSum(nbytes, crc32)

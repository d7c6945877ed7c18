"""The tensors of a checkpoint in chunks: each rank writes its chunks, and any set of ranks reads the parts that it needs.

The files are those of torch.distributed.checkpoint, whose planners assign the data to files. A tensor is stored flat. Its
chunks are the ranges of elements that the ranks had. An unpickler admits only the records of torch.distributed.checkpoint.
"""

import os
import pickle
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zero.checkpoint.files import FileSum, file_sum, reading, sync_folder, underlying_os_error
from zero.checkpoint.state import CheckpointError, TensorChunk, map_leaves, materialized
from zero.host_comm import gather_objects

# torch.distributed.checkpoint is used without torch.distributed on purpose: no warning
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_METADATA = ".metadata"
_RECORDS: tuple[type, ...] = (metadata.ChunkStorageMetadata, metadata.Metadata, metadata.MetadataIndex, torch.Size)
_RECORDS += (metadata.TensorProperties, metadata.TensorStorageMetadata, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo)
_ADMITTED: dict[tuple[str, str], Any] = {(record.__module__, record.__qualname__): record for record in _RECORDS}
_ADMITTED["torch.serialization", "_get_layout"] = torch.serialization._get_layout  # pickles refer to it for a torch.layout


def write_chunks(chunks: list[TensorChunk], folder: str, process_group: dist.ProcessGroup | None) -> dict[str, FileSum]:
    """Write each rank's chunks, which together cover every tensor once. Needs to be called on all ranks of the group.

    Return name and checksum of each file that any rank wrote into `folder`. Raise OSError on all ranks, if one cannot write.
    """
    writer, plan = _Writer(folder), _SavePlanner(_with_elements(chunks))
    try:
        dcp.save({}, storage_writer=writer, planner=plan, process_group=process_group, no_dist=process_group is None)
    except dcp.api.CheckpointException as failed:  # a subclass of BaseException
        rank, (error, _) = next(iter(failed.failures.items()))
        if isinstance(error, OSError):
            raise OSError(f"rank {rank} cannot write to {folder}: {error}") from failed
        raise error from failed
    written = [writer.sums] if process_group is None else gather_objects(writer.sums, process_group)
    return {name: checksum for sums in written for name, checksum in sums.items()}


def read_chunks(folder: str, chunks: list[TensorChunk]) -> None:
    """Fill the elements of `chunks`, which may be other chunks than those that were written. Each rank can call it alone.

    Raises CheckpointError if the files are missing, damaged, or not of these tensors.
    """
    with reading(folder):
        try:
            dcp.load({}, storage_reader=_Reader(folder), planner=_LoadPlanner(_with_elements(chunks), folder), no_dist=True)
        except dcp.api.CheckpointException as failed:  # a subclass of BaseException
            raise next(iter(failed.failures.values()))[0] from failed


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans the write of chunks in place of a state dict."""

    def __init__(self, chunks: list[TensorChunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self.chunks = {_index(chunk): chunk for chunk in chunks}

    def create_local_plan(self) -> planner.SavePlan:
        items = []
        for index, chunk in self.chunks.items():
            properties = metadata.TensorProperties.create_from_tensor(chunk.elements)
            data = planner.TensorWriteData(_storage_metadata(chunk), properties, torch.Size([chunk.numel]))
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        self.plan = planner.SavePlan(items)
        return self.plan

    def lookup_object(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self.chunks[index].read().reshape(-1)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans the read of chunks from a folder in place of a state dict."""

    def __init__(self, chunks: list[TensorChunk], folder: str) -> None:
        super().__init__(flatten_state_dict=False)
        self.chunks, self.folder = {_index(chunk): chunk for chunk in chunks}, folder

    def create_local_plan(self) -> planner.LoadPlan:
        assert self.metadata is not None
        stored: dict[str, Any] = self.metadata.state_dict_metadata
        items = []
        for chunk in self.chunks.values():
            if chunk.name not in stored or tuple(stored[chunk.name].size) != (chunk.numel,):
                raise CheckpointError(f"{self.folder} has no tensor {chunk.name} of {chunk.numel} elements")
            items += create_read_items_for_chunk_list(chunk.name, stored[chunk.name], [_storage_metadata(chunk)])
        return planner.LoadPlan(items)

    def lookup_tensor(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self.chunks[index].elements


class _Writer(dcp.FileSystemWriter):
    """Keeps the checksums of the files that this rank writes."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # in a thread, its stream would be on another GPU
        self.sums: dict[str, FileSum] = {}

    def storage_meta(self) -> None:
        """Return None. The default has a path of this machine, in a class with another name in other Python versions."""

    def write_data(self, plan: planner.SavePlan, planner: planner.SavePlanner) -> torch.futures.Future:
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            raise underlying_os_error(error) from error
        for name in {result.storage_data.relative_path for result in written.wait()}:
            self.sums[name] = file_sum(os.path.join(self.path, name))
        return written

    def finish(self, metadata: metadata.Metadata, results: list[Any]) -> None:
        super().finish(metadata, results)
        self.sums[_METADATA] = file_sum(os.path.join(self.path, _METADATA))
        sync_folder(str(self.path))


class _Reader(dcp.FileSystemReader):
    """Reads the metadata and runs no code from it."""

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
        """Replace getattr, with which Python 3.11 before 3.11.4 pickles an Enum."""
        if kind is not metadata._MEM_FORMAT_ENCODING:
            raise pickle.UnpicklingError("GLOBAL builtins.getattr is not admitted")
        return metadata._MEM_FORMAT_ENCODING[name]


def _with_elements(chunks: list[TensorChunk]) -> list[TensorChunk]:
    """Return the chunks that have elements, flat, in index order. Nothing is written for tensors without elements."""
    return [chunk._replace(elements=chunk.elements.reshape(-1)) for chunk in chunks if chunk.elements.numel()]


def _index(chunk: TensorChunk) -> metadata.MetadataIndex:
    return metadata.MetadataIndex(chunk.name, [chunk.start])


def _storage_metadata(chunk: TensorChunk) -> metadata.ChunkStorageMetadata:
    return metadata.ChunkStorageMetadata(torch.Size([chunk.start]), torch.Size([chunk.elements.numel()]))


def read_tensors(folder: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree with real tensors, filled from `folder`, in place of those on the meta device. Tied tensors stay tied."""
    filled, tensors = materialized(tree, torch.contiguous_format)
    read_chunks(folder, [TensorChunk.of_whole(name, tensor) for name, tensor in tensors.items()])
    return filled


def take_tensors(tree: dict[str, Any]) -> tuple[dict[str, Any], list[TensorChunk]]:
    """Return a tree in which meta tensors replace the real ones that have dimensions, and the real ones as chunks."""
    metas: dict[tuple[Any, ...], torch.Tensor] = {}
    chunks = []

    def take(name: str, leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.dim()):
            return leaf
        place = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)  # same for tied tensors
        if place not in metas or not leaf.numel():
            metas[place] = torch.empty_like(leaf, device="meta")
            chunks.append(TensorChunk.of_whole(name, leaf))
        return metas[place]

    return map_leaves(take, tree), chunks

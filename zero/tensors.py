"""Tensors as ranges of memory: flat views, storages, elements that share memory. Their nodes in a graph of autograd."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.dlpack import from_dlpack

# types of devices whose memory this is. A dry run adds "meta" while its tensors, which have no memory, stand for a CPU's
MAIN_MEMORY = {"cpu"}


def flattened(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Flatten `tensor`, which has the shape of `param`, in the order in which the elements of `param` lie in memory.

    Return (param.numel(),), a view if `tensor` has the strides of `param` and these are dense. So a channels_last parameter
    keeps its strides in the flat buffer. If `param` is not dense, as a frozen one can be, the order is that of the indices.
    """
    if param.is_contiguous() or not is_dense(param):
        return tensor.reshape(-1)
    return tensor.permute(sorted(range(param.dim()), key=param.stride, reverse=True)).reshape(-1)


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of contiguous elements, (like.numel(),), in the shape of `like`, and in its strides if dense."""
    if like.dim() == 1:
        return flat
    if like.is_contiguous() or not is_dense(like):
        return flat.view(like.shape)
    return flat.as_strided(like.shape, like.stride())


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tensors of equal length part by part.

    On a CPU, intermediate results then fit into its cache. On a GPU they need little memory, but more time than a launch;
    both moments of a shard of 5M elements, as of a bucket of GPT-2 XL on 8 ranks, are one piece.
    """
    length = (2**17 if tensors[0].device.type in MAIN_MEMORY else 10 * 2**20) // max(1, tensors[0].shape[1:].numel())
    if len(tensors[0]) <= length:
        return iter((tensors,))
    parts = zip(*(tensor.split(length) for tensor in tensors), strict=True)
    return itertools.islice(parts, 2) if tensors[0].is_meta else parts  # in a dry run, what two take all others take


def cut_sizes(slices: Iterable[tuple[int, int]], numel: int) -> list[int]:
    """Return the sizes for `cut`. `slices`: offsets and numbers of elements of slices of a flat tensor, (numel,), ascending."""
    sizes, end = [], 0
    for offset, length in slices:
        sizes += [offset - end, length]
        end = offset + length
    return [*sizes, numel - end]


def cut(flat: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Return views of the slices of a flat tensor by one call, which takes a third of the time of a call for each."""
    return torch.split_with_sizes(flat, sizes)[1::2]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie in memory without gaps and without overlap, in any order."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)


def properties(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]:
    """Return the shape, the strides (0 for a dimension that needs none), the dtype, and whether it requires gradients."""
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(tensor.shape), strides, tensor.dtype, tensor.requires_grad


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor have an address."""
    return tensor.numel() > 0 and not tensor.is_meta and torch._C._has_storage(tensor)


def memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start address and the end address of the elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def with_own_storage(part: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor with a storage of its own, (part.numel(),). `part` is contiguous.

    What copies, saves or compares storages (deepcopy, torch.save, safetensors) then takes the part, not the whole buffer.
    """
    with torch.cuda.device_of(part):  # tensors of another GPU cannot be exported
        return from_dlpack(part) if type(part) is torch.Tensor and part.device.type in ("cpu", "cuda") else part


def distinct_elements(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor that lie in different places in memory: the first one of each expanded dimension."""
    own = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    if may_overlap(own):
        raise ValueError(f"elements of {name} may share memory, so it cannot be broadcast; clone() it before wrapping")
    return own


def may_overlap(tensor: torch.Tensor) -> bool:
    """Return whether two elements may lie in the same place in memory."""
    if not tensor.numel():
        return False
    reach = 0  # offset of the last element in the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def name_of(param: torch.Tensor, names: Mapping[Any, str]) -> str:
    """Return the name of a parameter for messages, or what else is known of it."""
    return names.get(param) or f"a parameter of shape {tuple(param.shape)}"


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the output of a forward, as DistributedDataParallel finds them, and those in any other pytree."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, dict):  # a subclass of dict
            yield from tensors_in(list(leaf.values()))
        elif is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])


def nearest_leaf(node: Any) -> Any:
    """Return the node nearest to `node` in its graph that accumulates a gradient into a leaf."""
    pending = deque([node])
    while pending:
        node = pending.popleft()
        following = [other for other, _ in node.next_functions if other is not None]
        if not following and hasattr(node, "variable"):
            return node
        pending.extend(following)
    return None


def accumulates(leaf: Any) -> bool:
    """Return whether the running call of autograd accumulates a gradient into a leaf, and is not `torch.autograd.grad`."""
    try:
        return leaf is not None and torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # the leaf is an input of torch.autograd.grad
        return False

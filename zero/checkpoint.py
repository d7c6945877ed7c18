"""The checkpoint: state of all ranks, in a file that is whole or the one before it.

    $ python -m zero.checkpoint inspect out/ckpt.pt
    $ python -m zero.checkpoint convert out/ckpt.pt other/ckpt.pt

print what a file holds and whether its checksums hold, and make a consolidated checkpoint of a sharded one or the reverse.

A folder of checkpoints holds

ckpt.pt             the newest
ckpt_prev.pt        the one before, which takes over if the newest is damaged
ckpt_<iter>.pt      the last few by iteration, if asked for
ckpt*.pt.tmp        being written; what a killed process leaves of it is swept at the next start
shards_<iter>_*/    what sharded checkpoints among them keep outside the file; swept when none refers to it any more

A consolidated checkpoint is one file with everything in it, collected on rank 0. A sharded one is the same file with tensors
on the meta device in place of the real ones, which lie in a folder of torch.distributed.checkpoint: every rank writes
there what it owns, and reads what it needs. The file is what makes the folder count, so both are replaced in one instant.
"""

import glob
import os
import re
import shutil
import signal
import sys
import time
import uuid
import zipfile
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero.collectives import PATIENCE
from zero.consolidation import consolidate, model_state_dict, own_pieces, restore
from zero.contents import FORMAT, KEYS, manifest_entry, read_file, tensors_in, write_file
from zero.shards import CheckpointError, FileSum, Piece, damage, damaged, read, sync_folder, write

__all__ = [
    "FORMATS",
    "CheckpointError",
    "CheckpointWriter",
    "DivergedError",
    "SaveReport",
    "consolidate",
    "convert",
    "find",
    "load",
    "model_state_dict",
    "restore",
    "save",
    "verify",
]

FORMATS = ("consolidated", "sharded")
NAME, PREVIOUS = "ckpt.pt", "ckpt_prev.pt"
_BY_ITERATION = "ckpt_{:08d}.pt"
# nothing else is ever removed
_KEPT, _SHARDS = re.compile(r"ckpt_(\d{8,})\.pt"), re.compile(r"shards_\d{8,}_[0-9a-f]{8}")


class DivergedError(ArithmeticError):
    """Weights that are not finite, which take no checkpoint's place; the message names the first such tensor."""


class SaveReport(NamedTuple):
    """One checkpoint written."""

    iter_num: int
    nbytes: int
    write_s: float  # until it was on the disk
    consolidate_s: float = 0.0  # before that; training can go on after it, if the rest happens in the background
    complaint: str | None = None  # what went wrong once it was on the disk


def save(
    checkpoint: dict[str, Any], folder: str, keep: int = 0, rotate: bool = True, buffers: Container[str] = ()
) -> SaveReport:
    """Write `ckpt.pt` so that it is at every moment either the old file or the new one. One process only.

    The new file is complete and on the disk before it takes the name; the old one becomes `ckpt_prev.pt`.

    Args:
        checkpoint: nanoGPT's six keys and any others of plain values and CPU tensors.
        folder: where `ckpt.pt` lies; it must exist.
        keep: how many of the last checkpoints to keep by iteration besides.
        rotate: False if the old one is damaged, so that it must not take the place of `ckpt_prev.pt`.
        buffers: names in the model that may be inf, as a mask is.

    Raises:
        DivergedError: if a weight is not finite; the old files stand.
        OSError: if the disk is full or cannot be written to; the old files stand.
    """
    begin = time.perf_counter()
    _refuse([_first_not_finite((name, value) for name, value in checkpoint["model"].items() if name not in buffers)])
    path, previous = os.path.join(folder, NAME), os.path.join(folder, PREVIOUS)
    replaced = {_shards_of(path), _shards_of(previous)} - {None}
    _put(checkpoint, path, previous if rotate else None)
    report = SaveReport(checkpoint["iter_num"], os.path.getsize(path), time.perf_counter() - begin)
    try:
        if keep:
            _also_as(path, os.path.join(folder, _BY_ITERATION.format(checkpoint["iter_num"])))  # whatever others do to `path`
            names = [match for file in _glob(folder, "ckpt_*.pt") if (match := _KEPT.fullmatch(os.path.basename(file)))]
            # later ones are of a run that went back behind them, and not of this one
            so_far = sorted((int(name[1]), name[0]) for name in names if int(name[1]) <= checkpoint["iter_num"])
            for _, name in so_far[:-keep]:
                old = os.path.join(folder, name)
                replaced |= {_shards_of(old)} - {None}
                os.remove(old)
        _remove_unused(folder, replaced)
    except OSError as error:
        return report._replace(complaint=f"{path} is written, but not all is tidy beside it: {error}")
    return report


def _save_sharded(
    contents: dict[str, Any] | None,
    pieces: list[Piece],
    folder: str,
    keep: int,
    rotate: bool,
    buffers: Container[str],
    group: dist.ProcessGroup | None,
) -> SaveReport | None:
    """Write the pieces of all ranks, then rank 0's `contents` as `ckpt.pt`. Needs to be called on all ranks of the group.

    Returns:
        On rank 0 the report, elsewhere None.

    Raises:
        DivergedError: on all ranks if a weight is not finite; the old ones stand.
        OSError: on all ranks if one cannot write its pieces, on rank 0 if it cannot write the file; the old ones stand.
    """
    begin = time.perf_counter()
    named = ((piece.name.removeprefix("model."), piece) for piece in pieces if piece.name.startswith("model."))
    bad = [_first_not_finite((name, piece.elements) for name, piece in named if name not in buffers)]
    if group is not None:
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, bad[0], group=group)
        bad = gathered
    _refuse(bad)
    name = _shards_name(contents) if contents else None
    if group is not None:
        names = [name]
        dist.broadcast_object_list(names, group_src=0, group=group)
        [name] = names
    unfinished = os.path.join(folder, name + ".tmp")
    with _gone_unless_it_counts(os.path.join(folder, NAME), name) if contents else nullcontext():
        sums = write(pieces, unfinished, group)
        if group is not None:
            gathered = [{}] * dist.get_world_size(group)
            dist.all_gather_object(gathered, sums, group=group)
            sums = {file: entry for each in gathered for file, entry in each.items()}
        if contents is None:
            return None
        if missing := [file for file in sums if not os.path.exists(os.path.join(unfinished, file))]:
            raise OSError(f"rank 0 does not see what other ranks wrote to {folder} ({missing[0]}); use one that all share")
        report = save({**contents, "shards": _shards_entry(name, sums)}, folder, keep, rotate)
    nbytes = report.nbytes + sum(entry.nbytes for entry in sums.values())
    return report._replace(nbytes=nbytes, write_s=time.perf_counter() - begin)


class CheckpointWriter:
    """Writes the checkpoints of a run one after the other. Needs to be made on all ranks.

    Args:
        folder, keep: see `save`; the folder must be one that all ranks share.
        background: `save` returns once the state is collected, on the CPU, and a thread writes the file; a second `save`
            waits for the first.
        format: 'consolidated', everything on rank 0, or 'sharded', every rank what it owns.
        damaged: whether `find` has found the folder's newest checkpoint to be; what rank 0 says counts.
        sweep: remove what killed runs have left; False for a run that will save nothing and is to change nothing.
    """

    def __init__(
        self,
        folder: str,
        keep: int = 0,
        background: bool = False,
        format: str = "consolidated",
        damaged: bool = False,
        sweep: bool = True,
    ) -> None:
        self.folder, self.keep, self.background, self.format, self.damaged = folder, keep, background, format, damaged
        # of its own, and on the CPU, whatever the backend of the run: the thread's collectives run beside the others, and
        # NCCL would end a run whose ranks wait for its timeout, 10 minutes, while rank 0 writes
        distributed = dist.is_initialized()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if distributed else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._outcomes: deque[SaveReport | OSError | DivergedError] = deque()
        if sweep and (not distributed or dist.get_rank() == 0):
            for leftover in _glob(folder, "ckpt*.pt.tmp"):
                _remove_unused(folder, {_shards_of(leftover)} - {None})  # whole, but killed before it counted
                os.remove(leftover)
            for leftover in _glob(folder, "shards_*.tmp"):
                if _SHARDS.fullmatch(os.path.basename(leftover).removesuffix(".tmp")):
                    shutil.rmtree(leftover)

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Write a checkpoint; `outcomes` will tell whether that was possible. Needs to be called on all ranks.

        Args:
            model: as the training code made it, without what `zero.build` wrapped around it.
            values: plain values to go beside "model" and "optimizer"; those of rank 0 count.
        """
        self.wait()
        begin = time.perf_counter()
        buffers = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if self.format == "sharded":
            pieces, contents = own_pieces(model, optimizer)
            if self.background:
                pieces = [piece._replace(elements=piece.elements.to("cpu", copy=True)) for piece in pieces]
            contents = None if contents is None else {**contents, **values}
            write_it = partial(_save_sharded, contents, pieces, self.folder, self.keep, not self.damaged, buffers, self._group)
        else:
            contents = {"model": model_state_dict(model, optimizer), "optimizer": consolidate(optimizer), **values}
            write_it = partial(save, contents, self.folder, self.keep, not self.damaged, buffers)
            if contents["optimizer"] is None:  # rank 0 has it all
                write_it = _nothing
        write_it = partial(self._write, write_it, time.perf_counter() - begin)
        if self.background:
            self._pending = self._thread.submit(write_it)
        else:
            try:
                write_it()
            finally:
                self._meet()

    def wait(self) -> None:
        """Wait until nothing is being written. Needs to be called on all ranks.

        Raises what the thread raised, unless that is an outcome.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            finally:
                self._meet()

    def _meet(self) -> None:
        """Have the ranks wait here, however long one of them writes, rather than in the run's own collectives."""
        if self._group is not None:
            dist.barrier(self._group)

    def outcomes(self) -> list[SaveReport | OSError | DivergedError]:
        """What has come of the saves that have ended since the last call; on rank 0, of all of them."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def _write(self, write_it: Callable[[], SaveReport | None], consolidate_s: float) -> None:
        try:
            report = write_it()
        except (OSError, DivergedError) as error:
            self._outcomes.append(error)
            return
        self.damaged = False
        if report is not None:
            self._outcomes.append(report._replace(consolidate_s=consolidate_s))


def _nothing() -> None:
    """What a rank writes that has nothing to write."""


def find(folder: str) -> tuple[str, str | None]:
    """The newest undamaged checkpoint of a folder, and what is wrong with a newer one, if there is such.

    Reads every byte of the file. One process only; the others are told.

    Raises:
        CheckpointError: if there is none.
    """
    complaints = []
    for name in (NAME, PREVIOUS):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            try:
                verify(path)
            except CheckpointError as error:
                complaints.append(str(error))
            else:
                return path, "; ".join(complaints) or None
        elif name == NAME:
            complaints.append(f"there is no checkpoint {path}")
    raise CheckpointError("; ".join(complaints))


def verify(path: str) -> None:
    """Read every byte of a checkpoint and compare checksums.

    They are those that a file's container, a zip archive, keeps of each entry, and those that it keeps of its shards.

    Raises:
        CheckpointError: if the file is missing, damaged, or no checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{path} is a folder; name a file, such as {os.path.join(path, NAME)}") from error
    except Exception as error:  # see `read_file`
        raise CheckpointError(damaged(path, error)) from error
    if bad is not None:
        raise CheckpointError(damaged(path, f"the checksum of its entry {bad} does not hold"))
    checkpoint = read_file(path)
    if "shards" in checkpoint:
        sums = {name: FileSum(*entry) for name, entry in checkpoint["shards"]["files"].items()}
        if harm := damage(_shards_folder(path, checkpoint), sums):
            raise CheckpointError(damaged(path, harm))


def load(path: str) -> dict[str, Any]:
    """Read a checkpoint, its tensors memory-mapped, so that the ranks of a machine share one copy. Runs no code from it.

    Of a sharded one the model is read into memory, and the optimizer's state left for `restore`.

    Raises:
        CheckpointError: if the file is missing or damaged, holds more than tensors and plain values, or lacks one of the
            keys of a checkpoint.
    """
    checkpoint = read_file(path)
    if "shards" in checkpoint:
        folder = _shards_folder(path, checkpoint)
        _read_shards(folder, [("model", checkpoint["model"])])
        checkpoint["optimizer"]["shards"] = folder
    return checkpoint


def convert(source: str, target: str) -> str:
    """Write a consolidated checkpoint as a sharded one, or a sharded one as a consolidated one. One process only.

    A consolidated checkpoint is put together in memory.

    Returns:
        The format of the new one.

    Raises:
        CheckpointError: if the source cannot be read, or the target is no new name that ends in .pt.
        OSError: if the target cannot be written.
    """
    if os.path.exists(target) or not target.endswith(".pt"):
        raise CheckpointError(f"{target} {'exists' if os.path.exists(target) else 'does not end in .pt'}; give another name")
    verify(source)
    checkpoint = read_file(source)
    tensors = [("model", checkpoint["model"])]
    tensors += [(f"optimizer.state.{param}", entries) for param, entries in checkpoint["optimizer"]["state"].items()]
    if "shards" in checkpoint:
        _read_shards(_shards_folder(source, checkpoint), tensors)
        del checkpoint["shards"]
        _put(checkpoint, target)
        return "consolidated"
    name = _shards_name(checkpoint)
    with _gone_unless_it_counts(target, name):
        sums = write(_cut_out(tensors), os.path.join(os.path.dirname(target), name + ".tmp"), None)
        _put({**checkpoint, "shards": _shards_entry(name, sums)}, target)
    return "sharded"


def _first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The first name whose tensor holds an inf or a nan; takes no memory to speak of. None on the meta device is looked at."""
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            least, most = tensor.detach().aminmax()  # nan, if there is one
            if not (least.isfinite() and most.isfinite()):
                return name
    return None


def _refuse(bad: list[str | None]) -> None:
    """Raise for what any rank has found not to be finite."""
    if name := next(filter(None, bad), None):
        raise DivergedError(f"{name} is not finite")


def _shards_name(checkpoint: dict[str, Any]) -> str:
    """A new name for a folder of shards; one that counts already is never written to."""
    return f"shards_{checkpoint['iter_num']:08d}_{uuid.uuid4().hex[:8]}"


def _shards_entry(name: str, sums: dict[str, FileSum]) -> dict[str, Any]:
    """What the file of a sharded checkpoint says of its folder."""
    return {"folder": name, "files": {file: list(entry) for file, entry in sums.items()}}


def _shards_folder(path: str, checkpoint: dict[str, Any]) -> str:
    return os.path.join(os.path.dirname(path), checkpoint["shards"]["folder"])


def _shards_of(path: str) -> str | None:
    """The name of the folder that a file refers to, if it can be read and does."""
    try:
        name = read_file(path).get("shards", {}).get("folder", "")
    except CheckpointError:
        return None
    return name if _SHARDS.fullmatch(name) else None


def _remove_unused(folder: str, names: set[str]) -> None:
    """Remove those of the shards that no file refers to any more."""
    in_use = {_shards_of(file) for file in _glob(folder, "*.pt")} if names else set()
    for unused in filter(os.path.isdir, (os.path.join(folder, name) for name in names - in_use)):
        os.rename(unused, unused + ".tmp")  # what a kill leaves of it is swept at the next start
        shutil.rmtree(unused + ".tmp")


@contextmanager
def _gone_unless_it_counts(path: str, name: str) -> Iterator[None]:
    """If the block fails before the file at `path` refers to the shards `name`, these are removed."""
    try:
        yield
    except BaseException:
        if _shards_of(path) != name:
            for left in (name, name + ".tmp"):
                shutil.rmtree(os.path.join(os.path.dirname(path), left), ignore_errors=True)
        raise


def _read_shards(folder: str, tensors: list[tuple[str, dict[str, Any]]]) -> None:
    """Put real tensors in place of those on the meta device; tied ones stay tied. `tensors`: prefix of names, and a dict."""
    real: dict[int, torch.Tensor] = {}
    pieces = []
    for prefix, entries in tensors:
        for key, tensor in entries.items():
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                if id(tensor) not in real:
                    real[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    pieces.append(Piece.of_whole(f"{prefix}.{key}", real[id(tensor)]))
                entries[key] = real[id(tensor)]
    read(folder, pieces)


def _cut_out(tensors: list[tuple[str, dict[str, Any]]]) -> list[Piece]:
    """Put tensors on the meta device in place of real ones that have dimensions; the real ones, in pieces."""
    metas: dict[tuple[Any, ...], torch.Tensor] = {}
    pieces = []
    for prefix, entries in tensors:
        for key, tensor in entries.items():
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)  # of tied ones the same
                if place not in metas or not tensor.numel():
                    metas[place] = torch.empty_like(tensor, device="meta")
                    pieces.append(Piece.of_whole(f"{prefix}.{key}", tensor))
                entries[key] = metas[place]
    return pieces


def _put(checkpoint: dict[str, Any], path: str, previous: str | None = None) -> None:
    """Write a checkpoint's file, and let it and its shards count from one instant on. What was there becomes `previous`."""
    with _replacing(path) as temporary:
        write_file(checkpoint, temporary)
        if "shards" in checkpoint:
            shards = _shards_folder(path, checkpoint)
            os.rename(shards + ".tmp", shards)
            sync_folder(os.path.dirname(path) or ".")
        if previous is not None and os.path.exists(path):
            _also_as(path, previous, link=True)  # `path` is about to be another file


def _glob(folder: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), pattern))


@contextmanager
def _replacing(path: str) -> Iterator[str]:
    """A name to write to; what is there takes the place of `path` when the block has ended well, and goes when it has not."""
    temporary = path + ".tmp"
    try:
        yield temporary
        os.replace(temporary, path)
        sync_folder(os.path.dirname(path) or ".")
    finally:
        if os.path.lexists(temporary):
            os.remove(temporary)


def _also_as(path: str, other: str, link: bool = False) -> None:
    """Copy a file to another name, in place of what had it; or, where a file can have two names, give it that one as well."""
    with _replacing(other) as temporary:
        if os.path.lexists(temporary):
            os.remove(temporary)  # it may be another name of a file that counts
        if link:
            with suppress(OSError):
                os.link(path, temporary)
        if not os.path.lexists(temporary):
            shutil.copyfile(path, temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())


def _inspect(path: str) -> bool:
    """Print what a file holds; whether its checksums hold."""
    verify(path)
    checkpoint = read_file(path)
    manifest, tensors = checkpoint.get("manifest", {}), dict(tensors_in(checkpoint))
    format = f"{FORMATS['shards' in checkpoint]}, format {FORMAT}" if manifest else "written by nanoGPT"
    print(f"{path}: {os.path.getsize(path) / 1e6:.1f} MB, {format}")
    print(f"iteration {checkpoint['iter_num']}, best validation loss {float(checkpoint['best_val_loss']):.4f}")
    print(f"model_args {checkpoint['model_args']}")
    for key in sorted(checkpoint.keys() - KEYS.keys() - {"manifest", "shards"}):
        print(f"{key} {checkpoint[key]}")
    if "shards" in checkpoint:
        sizes = [nbytes for nbytes, _ in checkpoint["shards"]["files"].values()]
        print(f"{len(sizes)} files with a checksum each, {sum(sizes) / 1e6:.1f} MB in {_shards_folder(path, checkpoint)}")
    wrong = sorted(manifest.keys() ^ tensors.keys()) if manifest else []
    for name, tensor in tensors.items():
        entry = manifest.get(name)
        holds = entry is None or entry == manifest_entry(tensor)
        if not holds:
            wrong.append(name)
        print(f"  {name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{'' if holds else ' WRONG CHECKSUM'}")
    elements = sum(tensor.numel() for name, tensor in tensors.items())
    sound = "all checksums hold" if manifest else "it has no checksums but those of the archive, which hold"
    print(f"{len(tensors)} tensors, {elements / 1e6:.1f}M numbers; {sound if not wrong else f'wrong: {wrong}'}")
    return not wrong


def main(arguments: list[str]) -> int:
    """The commands `inspect` and `convert`; the exit code."""
    try:
        match arguments:
            case ["inspect", path]:
                return 0 if _inspect(path) else 1
            case ["convert", source, target]:
                print(f"{target}: {convert(source, target)}")
                return 0
            case _:
                raise CheckpointError("say what to do: python -m zero.checkpoint inspect FILE, or convert FILE NEW_FILE")
    except (CheckpointError, OSError) as problem:
        sys.stderr.write(f"error: {problem}\n")
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads the output may leave, as `head` does
    sys.exit(main(sys.argv[1:]))

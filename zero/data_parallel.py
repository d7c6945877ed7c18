"""ShardedDataParallel: reduce-scatters during backward, all-gathers during the next forward."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from zero.collectives import Reduction
from zero.optimizer import SPARSE, Bucket, ShardedOptimizer

_IN_FLIGHT = 2  # reduce-scatters at a time: one on the wire, the next one ready; more is no faster and takes memory


class Place(NamedTuple):
    """Where elements `start:stop` of a parameter lie: from `offset` on in bucket number `bucket`."""

    bucket: int
    offset: int
    start: int
    stop: int


class Agreement(NamedTuple):
    """An all-reduce in flight. When its works are done, `used` says which parameters have a gradient on any rank."""

    used: torch.Tensor  # (parameters,) uint8
    works: list[dist.Work]


class ShardedDataParallel(nn.Module):
    """Data parallelism for a model whose optimizer is a ShardedOptimizer, in place of DistributedDataParallel.

    backward   as a parameter's gradient arrives, it is divided by the number of ranks, copied into its bucket and freed; a
               bucket that has all its gradients is reduce-scattered at once, in the order of the buckets. After backward
               `param.grad` is None: clip with `optimizer.clip_grad_norm_`, scale float16 with `ShardedGradScaler`
    step       the optimizer waits for the reduce-scatters (this is its phase 1), updates, and starts the all-gathers
    forward    a module waits for the all-gathers of the buckets that its own parameters lie in, just before it runs

    So a rank sends the bytes of one all-reduce, half of them while backward runs and half while forward does. `state_dict`
    and `load_state_dict` of the model wait for all gathers; whoever else reads parameters calls
    `optimizer.synchronize()` first. A module that is compiled (`module.compile()`, before it is wrapped) waits as a whole,
    and its gradients arrive together: compile the blocks of a model, not all of it, and the overlap remains.

    A parameter without a gradient on any rank is skipped by the update; one that has a gradient on some ranks counts as
    zero on the others.

    With `require_backward_grad_sync = False`, or inside `no_sync()`, gradients accumulate in `param.grad` as under
    DistributedDataParallel, and the next synchronized backward sends their sum. With `shard_gradients` every backward
    reduce-scatters and adds to the owned shards, so a full gradient never outlives its bucket (the paper's P_os+g), at the
    price of a reduce-scatter per micro-step.

    If the optimizer has a `param_dtype`, frozen parameters and buffers take it on, too. Gradients then arrive, accumulate
    and are sent in that dtype; sums over ranks, and over micro-steps with `shard_gradients`, are float32.

    Construction broadcasts frozen parameters and buffers from rank 0, as the optimizer has done with its own; buffers (the
    statistics of BatchNorm, say) are each rank's own from then on. It, forward, backward and step need to be called on all
    ranks.

    Raises:
        ValueError: if a trainable parameter of `module` is not the optimizer's, or one of the two is of the wrong kind.
        RuntimeError: from backward or step, if gradients of the last step are still there, or those of this one have
            not been sent, or one is sparse.

    Source: Rajbhandari et al., "ZeRO", sections 5.1 and 5.2; the interface is that of
    `torch.nn.parallel.DistributedDataParallel`.
    """

    gathers_in_background = True

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer, shard_gradients: bool = False) -> None:
        super().__init__()
        if not isinstance(optimizer, ShardedOptimizer):
            raise ValueError(f"ShardedDataParallel needs a ShardedOptimizer, not {type(optimizer).__name__}")
        if any(isinstance(part, nn.parallel.DistributedDataParallel | ShardedDataParallel) for part in module.modules()):
            raise ValueError("the module is wrapped for data parallelism already; ShardedDataParallel takes the bare one")
        self.module = module
        self.optimizer = optimizer
        self.shard_gradients = shard_gradients
        self.require_backward_grad_sync = True
        self._comm = optimizer.comm

        self._params = [param for buffer in optimizer.buffers for param in buffer.params]
        self._number = {param: number for number, param in enumerate(self._params)}
        if strangers := self._strangers(module):
            raise ValueError(f"these parameters require gradients but are not the optimizer's: {', '.join(strangers)}")
        self._others = [(name, param) for name, param in module.named_parameters() if param not in self._number]
        self._places: dict[nn.Parameter, list[Place]] = {param: [] for param in self._params}
        for index, bucket in enumerate(optimizer.buckets):
            for param, piece, offset in bucket.members:
                self._places[param].append(Place(index, offset, piece.start, piece.stop))

        count = len(optimizer.buckets)
        self._shards: list[torch.Tensor | None] = [None] * count  # (sizes[rank],), the mean gradient of this step
        self._reduced = [False] * count  # whether the shard holds a gradient of this step
        self._filling: list[torch.Tensor | None] = [None] * count  # (sum of sizes,), gradients as they arrive
        self._reductions: list[Reduction | None] = [None] * count  # in flight
        self._missing: list[set[nn.Parameter]] = []  # by bucket; empty outside of backward
        self._next = 0  # the bucket to be reduced next
        self._used: set[int] = set()  # numbers of the parameters that had a gradient on this rank
        self._agreement: Agreement | None = None  # in flight
        self._collected = False
        self._called: set[nn.Parameter] = set()  # since the last step, the parameters of modules that have run
        self._root_waits_for: set[int] = set()  # buckets of parameters that are used without their module being called

        if optimizer.param_dtype is not None:
            module.to(optimizer.param_dtype)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor not in self._number:
                self._comm.broadcast(tensor.data)
        for param in self._params:
            param.register_post_accumulate_grad_hook(_weakly(self._on_gradient))
        self._wait_before_forward(module)
        module.register_forward_pre_hook(self._waiter(self._root_waits_for, []))
        for part in module.modules():
            part.register_state_dict_pre_hook(lambda *_: optimizer.synchronize())
            part.register_load_state_dict_pre_hook(self._before_loading)
            part.register_load_state_dict_post_hook(self._after_loading)
        optimizer.source = self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in this block; see DistributedDataParallel.no_sync."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- backward ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _on_gradient(self, param: nn.Parameter) -> None:
        """Take a gradient that backward has just finished."""
        if not (self.require_backward_grad_sync or self.shard_gradients):
            self._comm.pool.clear()  # makes room for the full gradients
            return
        if not self._missing:
            self._begin_backward()
        if param not in self._called:
            self._root_waits_for |= {place.bucket for place in self._places[param]}
        self._fill(param)

    def _begin_backward(self) -> None:
        if self._collected:
            raise RuntimeError("gradients of the last step are still there; call optimizer.zero_grad() before backward")
        self._missing = [{param for param, _, _ in bucket.members} for bucket in self.optimizer.buckets]
        self._next = 0
        Variable._execution_engine.queue_callback(self._end_backward)

    def _fill(self, param: nn.Parameter) -> None:
        """Copy a gradient, divided by the number of ranks, to its places in the buckets, and free it."""
        if param.grad.is_sparse:
            raise RuntimeError(SPARSE)
        self._used.add(self._number[param])
        gradient = param.grad.reshape(-1)
        for index, offset, start, stop in self._places[param]:
            place = self._filled(index)[offset : offset + stop - start]
            torch.mul(gradient[start:stop], 1 / self._comm.world_size, out=place)
            self._missing[index].discard(param)
            self._reduce_full_buckets()  # before the next one is taken: a large parameter fills several
        param.grad = None

    def _filled(self, index: int) -> torch.Tensor:
        """The tensor that collects the gradients of a bucket."""
        if self._filling[index] is None:
            data = self.optimizer.buckets[index].data
            self._filling[index] = self._comm.pool.take(data.numel(), data)
        return self._filling[index]

    def _reduce_full_buckets(self) -> None:
        """Start the reduce-scatter of every full bucket whose turn it is: all ranks must start them in one order."""
        while self._next < len(self._missing) and not self._missing[self._next]:
            index, self._next = self._next, self._next + 1
            self._finish(index)  # of the micro-step before
            self._finish(index - _IN_FLIGHT)
            self._reductions[index] = self._comm.reduce_scatter(self._filled(index), self.optimizer.buckets[index].sizes)
            self._filling[index] = None

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Complete the buckets that wait for parameters that this backward did not reach."""
        for index, bucket in enumerate(self.optimizer.buckets):
            for param, piece, offset in bucket.members:
                if param not in self._missing[index]:
                    continue
                if param.grad is not None:  # of an earlier micro-step
                    self._fill(param)
                else:
                    self._filled(index)[offset : offset + piece.numel].zero_()
                    self._missing[index].discard(param)
        self._reduce_full_buckets()
        self._missing = []
        self._settle_agreement()  # of the micro-step before
        used = torch.ones(len(self._params), dtype=torch.uint8, device=self._params[0].device)
        if unused := [number for number in range(len(self._params)) if number not in self._used]:
            used[unused] = 0
        self._agreement = Agreement(used, self._comm.all_reduce(used, dist.ReduceOp.MAX))

    def _finish(self, index: int) -> None:
        """If a reduce-scatter of this bucket is in flight, wait for it and take its sum into the shard."""
        if index < 0 or self._reductions[index] is None:
            return
        reduction, self._reductions[index] = self._reductions[index], None
        if self._shards[index] is None:
            like = self.optimizer.buckets[index].updated
            self._shards[index] = self._comm.pool.take(like.numel(), like)
        self._comm.add(reduction, self._shards[index], first=not self._reduced[index])
        self._reduced[index] = True

    # -- step ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self) -> Iterator[Bucket]:
        """See GradientSource."""
        if not self._collected:
            if self._missing:
                raise RuntimeError("the last backward did not end; call optimizer.zero_grad() and repeat the step")
            for name, param in self._others:
                if param.grad is not None:
                    raise RuntimeError(f"{name} was frozen when ShardedOptimizer was built and has a gradient now; build anew")
            self._settle_agreement()
            if any(param.grad is not None for param in self._params):
                raise RuntimeError(
                    "gradients of this step have not been sent; its last backward must run outside of no_sync(), "
                    "with require_backward_grad_sync = True"
                )
        for index, bucket in enumerate(self.optimizer.buckets):
            if not self._collected:
                self._finish(index)
                for owned in bucket.owned:
                    if self._reduced[index] and self._number[owned.param] in self._used:
                        shard = self._shards[index]
                        owned.local.grad = shard[owned.offset : owned.offset + owned.local.numel()].view(owned.local.shape)
                    else:
                        owned.local.grad = None
            yield bucket
        if not self._collected:
            self._called.clear()
        self._collected = True

    def clear(self) -> None:
        """See GradientSource."""
        self._settle_agreement()
        for index in range(len(self._reductions)):
            self._finish(index)
            if self._shards[index] is not None:
                self._comm.pool.give_back(self._shards[index])
                self._shards[index] = None
        self._collected = False
        self._reduced = [False] * len(self._reduced)
        self._used = set()
        self._missing, self._filling = [], [None] * len(self._filling)  # of a backward that has failed

    def _settle_agreement(self) -> None:
        """Count as used what any rank has used. A rank that has used everything need not wait for the others."""
        if self._agreement is not None:
            self._comm.wait("agreement", self._agreement.works, self._agreement.used.device)
            if len(self._used) < len(self._params):
                self._used |= set(self._agreement.used.nonzero().flatten().tolist())
            self._agreement = None

    # -- forward -------------------------------------------------------------------------------------------------------

    def _wait_before_forward(self, module: nn.Module) -> None:
        """Have every module that holds parameters wait for its all-gathers before it runs.

        One that is compiled waits for those of all its children, too, and so do torch's own modules, some of which read
        a child's weight without calling the child (MultiheadAttention, TransformerEncoderLayer). Where another module
        does so, the first backward, which comes before the first gather, finds out, and from then on the whole model
        waits for those weights.
        """
        own = type(module).__module__.startswith("torch.nn.")
        container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        together = module._compiled_call_impl is not None or (own and not container)
        params = [param for param in module.parameters(recurse=together) if param in self._number]
        if params:
            indices = {place.bucket for param in params for place in self._places[param]}
            module.register_forward_pre_hook(self._waiter(indices, params))
        if not together:
            for child in module.children():
                self._wait_before_forward(child)

    def _waiter(self, indices: set[int], params: list[nn.Parameter]) -> Callable[..., None]:
        @torch._dynamo.disable
        def wait(*_: Any) -> None:
            self._called.update(params)
            self.optimizer.synchronize(self.optimizer.buckets[index] for index in sorted(indices))

        return wait

    @torch.no_grad()
    def _before_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Load into the masters what the state dict has in full precision; the module itself loads the rest."""
        self.optimizer.synchronize()
        if self.optimizer.param_dtype is not None:
            for name, param in module.named_parameters(recurse=False):
                value = state_dict.get(prefix + name)
                if value is not None and value.shape == param.shape:
                    self.optimizer.set_parameter(param, value)

    def _strangers(self, module: nn.Module) -> list[str]:
        """The names of trainable parameters that are not the optimizer's."""
        return [name for name, param in module.named_parameters() if param.requires_grad and param not in self._number]

    def _after_loading(self, module: nn.Module, _: Any) -> None:
        if strangers := self._strangers(module):
            raise RuntimeError(
                f"load_state_dict(assign=True) has replaced {', '.join(strangers)} of {type(module).__name__}, which the "
                "optimizer would go on updating; load with assign=False"
            )

    # ------------------------------------------------------------------------------------------------------------------

    def held_bytes(self) -> dict[str, int]:
        """See GradientSource."""
        buckets = [tensor for tensor in self._filling if tensor is not None]
        for reduction in self._reductions:
            if reduction is not None:
                buckets += [reduction.bucket, *reduction.received]
        return {
            "gradients": sum(shard.nbytes for shard in self._shards if shard is not None),
            "buckets": sum(tensor.nbytes for tensor in buckets) + self._comm.pool.nbytes,
        }


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep its owner alive: what hangs on a tensor is out of the garbage collector's sight."""
    reference = weakref.WeakMethod(method)

    def hook(param: nn.Parameter) -> None:
        alive = reference()
        if alive is not None:
            alive(param)

    return hook

"""What a rank sends and how long its computation waits for it, for each of the three implementations."""

from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from forecast.baselines import sent_by_data_parallel
from zero.collectives import KINDS
from zero.optimizer import ShardedOptimizer
from zero.sharded_state import partition
from zero.stopwatch import Stopwatch, mark
from zero.tensors import tensors_in


class CommunicationMeter:
    """Counts the bytes sent and the time waited (exposed communication) of a wrapped model and its optimizer.

    all-reduce      DistributedDataParallel: from the last gradient until backward ends. ShardedDataParallel: the scalars
                    that it reduces, for example the gradient norm (waits only), and the shards if they have replicas.
    reduce-scatter  ShardedDataParallel: waits in backward, and before the gradients are clipped.
    all-to-all      `zero.Muon` under ShardedDataParallel: matrices on the way to their owners and back, waits in step.
    all-gather      ShardedDataParallel: waits in step, or with `overlap` in forward.
    broadcast       ZeroRedundancyOptimizer: from the end of its update until every rank has every parameter.

    A wait includes the wait for slower ranks. Collectives of the training loop itself are not included. The hooks that
    construction installs start no collective and do not wait for a GPU.

    Args:
        model, optimizer: what `zero.build.build` returned.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._comm = optimizer.comm if isinstance(optimizer, ShardedOptimizer) else None
        self.waits = self._comm.waits if self._comm else Stopwatch(of_collectives=True)  # by kind of collective
        self._device = next(model.parameters()).device
        self._sent_per_step: dict[str, int] = {}
        self._synchronized = 0  # number of backward passes with an all-reduce
        if isinstance(model, DistributedDataParallel):
            plan, world_size = partition(optimizer).plan, model.process_group.size()
            self._sent_per_step = sent_by_data_parallel(plan, world_size)
            model.register_forward_hook(self._after_forward)
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            self._broadcast = optimizer._sync_params  # type: ignore[attr-defined]  # not in torch's stubs
            optimizer._sync_params = self._timed_broadcast  # type: ignore[attr-defined]

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank has sent, by kind: counted, or the predicted ones per synchronized backward."""
        if self._comm is not None:
            return {kind: self._comm.sent_bytes[kind] for kind in KINDS}
        return {kind: self._sent_per_step.get(kind, 0) * self._synchronized for kind in KINDS}

    def waited_ms(self) -> dict[str, float]:
        """Return the time that the computation has waited, in ms, by kind. Waits until a GPU has ended the last wait."""
        waited = self.waits.read_ms()
        return {kind: waited.get(kind, 0.0) for kind in KINDS}

    def _after_forward(self, model: torch.nn.Module, _: Any, output: Any) -> None:
        if torch.is_grad_enabled() and model.require_backward_grad_sync:

            def on_gradient(_: torch.Tensor) -> None:
                for hook in hooks:  # one output can be computed from another one
                    hook.remove()
                self._begin_backward()

            hooks = [tensor.register_hook(on_gradient) for tensor in tensors_in(output) if tensor.requires_grad]

    def _begin_backward(self) -> None:
        """Measure the end of this backward: autograd calls DistributedDataParallel's callback between the two queued here."""

        def on_last_gradient() -> None:
            begin = mark(self._device)
            Variable._execution_engine.queue_callback(lambda: self.waits.add("all-reduce", begin, mark(self._device)))

        self._synchronized += 1
        Variable._execution_engine.queue_callback(on_last_gradient)

    def _timed_broadcast(self) -> None:
        with self.waits.measure("broadcast", self._device):
            self._broadcast()

"""What PyTorch's fully_shard (FSDP2) would take, to say when ZeRO-1 is the wrong tool. train.py does not have it."""

from dataclasses import dataclass

from forecast.prediction import Activations, Point, Prediction


@dataclass(frozen=True)
class FullyShardedPrediction(Prediction):
    """For fully_shard of each block and of the model, with its defaults.

    In every micro-step, the weights of a block are gathered in forward and again in backward, those outside of the blocks once,
    and all gradients are reduce-scattered. A collective counts as a ring, as with NCCL.

    Weights, gradients and state are exact up to padding. The peak is an estimate, within 2 %: beside the largest
    activations, it counts three whole blocks and what lies outside of the blocks.

    Args:
        plan: see `zero.layout.replicated_plan`.
        block_numel: parameters of a block.
        root_numel: parameters outside of the blocks.
        itemsize: bytes per element of gathered weights, and of gradients that are sent.
    """

    block_numel: int = 0
    root_numel: int = 0
    itemsize: int = 4

    def at(self, point: Point) -> dict[str, int]:
        own = -(-self.parameters // self.world_size)
        return {
            "parameters": own,
            "gradients": own if point in ("accumulating", "before step") else 0,
            "state": 0 if point == "after wrapping" else -(-self.plan.state_bytes[0] // self.world_size),
            "master": 0,
            "buckets": 0,
        }

    def peak_of_training(self, activations: Activations) -> int:
        root = self.root_numel * self.itemsize
        largest = max(activations.before_embedding + self.largest_buckets, activations.embedding + root)
        return sum(self.at("before step").values()) + largest

    def sent(self) -> dict[str, int]:
        numels = self._gathered, self.root_numel, sum(spec.numel for spec in self.plan.params)
        whole, root, trained = (numel * self.itemsize * (self.world_size - 1) // self.world_size for numel in numels)
        return {"all-gather": self.micro_steps * (2 * whole - root), "reduce-scatter": self.micro_steps * trained}

    @property
    def exposed_share(self) -> float:
        return self.root_numel / max(1, self._gathered)

    @property
    def gathered_in_forward(self) -> float:
        """Part of the all-gathers that runs in forward."""
        return self._gathered / (2 * self._gathered - self.root_numel)

    @property
    def largest_buckets(self) -> int:
        return (self.root_numel + 3 * self.block_numel) * self.itemsize

    @property
    def _gathered(self) -> int:
        """Number of all parameters, which are float32 outside of the computation."""
        return self.parameters // 4

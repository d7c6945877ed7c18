"""How long an iteration will take: computation at a given MFU, and the communication that it does not hide. Arithmetic only."""

from typing import NamedTuple

from forecast.prediction import Prediction
from zero.collectives import KINDS


class Network(NamedTuple):
    """The bandwidths between ranks and between machines."""

    inside: float  # Gbit/s from a rank to ranks of its machine
    across: float  # Gbit/s from a machine to other machines
    ranks_per_machine: int

    def across_machines(self, prediction: Prediction) -> dict[str, float]:
        """Return the bytes per iteration that leave a machine, as the mean over its ranks, by kind of collective.

        Every collective counts as a ring through its ranks in order: some of them send to the next machine.
        """
        sent, machine = prediction.sent, self.ranks_per_machine
        if prediction.world_size <= machine:
            return dict.fromkeys(sent, 0.0)
        sharded = bool(prediction.plan.buffers)
        group = prediction.plan.world_size if sharded else prediction.world_size
        share = 1 / machine if group > machine else 0.0
        # with hybrid sharding, the replicas of a shard are `group` ranks apart
        share_of_replicas = min(1.0, group / machine) if sharded else share
        return {kind: count * (share_of_replicas if kind == "all-reduce" else share) for kind, count in sent.items()}

    def seconds(self, prediction: Prediction) -> dict[str, float]:
        """Return how long the collectives of an iteration take, by kind, without their latency."""
        across = self.across_machines(prediction)
        return {
            kind: ((count - across[kind]) / self.inside + across[kind] * self.ranks_per_machine / self.across) * 8 / 1e9
            for kind, count in prediction.sent.items()
        }

    def exposed(self, prediction: Prediction, forward: float, backward: float, newton_schulz: float = 0.0) -> dict[str, float]:
        """Return the seconds of an iteration in which computation waits for communication, by kind of collective.

        Args:
            forward, backward: seconds of a micro-step.
            newton_schulz: seconds of an iteration in which Muon computes with whole matrices.

        Reductions run during the backward that sends them, all-gathers during the next forward, the exchange of matrices while
        others are transformed, and the broadcasts of ZeroRedundancyOptimizer during nothing. The embedding is always exposed,
        see `Prediction.exposed_share`.
        """
        took = dict.fromkeys(KINDS, 0.0) | self.seconds(prediction)

        def not_hidden(seconds: float, by: float, share: float = prediction.exposed_share) -> float:
            return max(seconds * share, seconds - by)

        sending = prediction.micro_steps if prediction.shard_gradients else 1  # backwards that send
        each = took["reduce-scatter"] / sending
        last = not_hidden(each + took["all-reduce"], backward)  # of replicas, too
        earlier = max(0.0, not_hidden(each, backward) - forward)  # what is left runs beside the next forward
        return {
            "reduce-scatter" if each else "all-reduce": (sending - 1) * earlier + last,
            "all-to-all": not_hidden(took["all-to-all"], newton_schulz, 1 / max(1, prediction.matrix_rounds)),
            "all-gather": not_hidden(took["all-gather"], forward, prediction.exposed_weights),
            "broadcast": took["broadcast"],
        }

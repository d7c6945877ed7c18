"""ZeRO stage 1 for PyTorch: optimizer state divided evenly among the ranks. Imports only torch and its own modules."""

from zero.autocast import autocast_parameters
from zero.data_parallel import ShardedDataParallel
from zero.grad_scaler import ShardedGradScaler
from zero.muon import Muon
from zero.optimizer import ShardedOptimizer

__all__ = ["Muon", "ShardedDataParallel", "ShardedGradScaler", "ShardedOptimizer", "autocast_parameters"]

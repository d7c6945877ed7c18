"""ZeRO stage 1 for PyTorch: optimizer state divided evenly among the ranks. Imports torch and itself only."""

from zero.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]

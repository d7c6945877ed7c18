"""Muon with sharded state: the optimizer, the whole matrices of each rank, and their exchange."""

from zero.muon.muon import Muon

__all__ = ["Muon"]

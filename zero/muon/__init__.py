"""Muon with sharded state: `matrices` says which rank gets which matrix whole, `exchange` sends them there and back."""

from zero.muon.muon import Muon

__all__ = ["Muon"]

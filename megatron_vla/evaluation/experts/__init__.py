"""Scripted experts for simulators that ship none: they read hidden state, act through the policy's own action space."""

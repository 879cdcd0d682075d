"""Megatron-style training of Vision-Language-Action robot models."""

from megatron_vla.version import __version__

__all__ = ["__version__"]

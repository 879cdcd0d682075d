"""The one version string: read by setup.py, written into every checkpoint."""

__version__ = "0.1.0"

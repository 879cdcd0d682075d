"""Fused kernels, one folder each: csrc/, op.py, reference.py, test_*.py, benchmark.py, README.md."""

"""gelu(gate) * up on the output of a merged product."""

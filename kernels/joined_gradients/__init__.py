"""Gradients of the parts of a merged product, side by side, with the sums that its bias wants."""

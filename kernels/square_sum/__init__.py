"""Sum of squares over all gradients in one launch."""

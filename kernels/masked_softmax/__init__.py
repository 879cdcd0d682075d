"""Softmax of fp32 attention logits with a factor and a mask, rounded once."""

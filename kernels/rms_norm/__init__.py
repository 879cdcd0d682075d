"""RMSNorm of bf16 rows, alone or with the residual addition before it, forward and backward."""

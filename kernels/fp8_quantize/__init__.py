"""bf16 to FP8 in both layouts with a given scale, after gated GELU and its backward too."""

"""gelu_tanh of a biased product; its backward also gives the bias its gradient."""

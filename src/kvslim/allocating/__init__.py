"""Statistics and a budget to a plan. No tensors of the model, no cache."""

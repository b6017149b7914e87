"""Tensor to codes and scales, and back. Pure torch; no model, no cache, no policy."""

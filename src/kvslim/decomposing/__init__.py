"""Tensor and rank to factors. Pure linear algebra; no model, no cache, no policy."""

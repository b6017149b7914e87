"""Compressing a checkpoint on disk, layer by layer, so that the model never has to fit in memory."""

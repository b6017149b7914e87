"""Compressed models on disk: safetensors and JSON, checked before anything is built from them."""

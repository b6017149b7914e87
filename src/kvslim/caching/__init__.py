"""What is kept of a prefix, and the transformers caches that keep it. One class per storage form."""

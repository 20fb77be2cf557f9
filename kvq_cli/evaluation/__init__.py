"""Perplexity, KL divergence, RULER and lm-eval's tasks with a compressed KV cache, several methods side by side."""

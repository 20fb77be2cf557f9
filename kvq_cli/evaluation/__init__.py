"""Perplexity, divergence and RULER with a compressed cache, several methods side by side."""

"""Capture keys, values and gradients of a model; cluster or factorize them; write an artifact."""

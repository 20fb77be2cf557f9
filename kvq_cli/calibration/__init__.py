"""Calibration: capture keys, values and gradients and cluster them, or factorize weights; write an artifact."""

"""Blocks of numbers to bit-packed tensors and back: quantizers, codebooks, outliers. No model, no windows."""

"""The papers' studies of keys, values, weights and quantization errors: one file per study, run by `kvq analyze`."""

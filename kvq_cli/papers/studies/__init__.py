"""The papers' studies of keys, values, weights and errors: one file each, run by `kvq analyze`."""

"""Training of the built-in reference model; README.md says how to run it. The product never imports this package."""

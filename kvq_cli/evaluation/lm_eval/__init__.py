"""Tasks of lm-eval with a compressed cache: as tasks of `kvq eval`, and through the model `kvq` in lm-eval itself."""

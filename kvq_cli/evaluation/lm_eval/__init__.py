"""lm-eval's tasks with a compressed cache: as tasks of `kvq eval`, and as the model `kvq` of lm-eval's own command."""

"""The compressed cache: per layer and stream sinks, packed tokens and recent tokens, and the bytes they take."""

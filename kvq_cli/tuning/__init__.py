"""Choose the method and the bits of each layer's keys and values, and check the choice in KL divergence."""

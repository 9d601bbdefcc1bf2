"""Train a detector, iteration by iteration. Everything that is random is a function of the seed and the iteration, so that a run goes on exactly."""

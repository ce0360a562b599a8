"""From a model on disk to a runner."""

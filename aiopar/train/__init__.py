"""Training on several workers: `Parallel` and `Parallelizable`."""

"""From a captured model to a lowered program: the pipeline, its cache, and the kernels that its steps will call."""

"""What a model loses by quantization: perplexity, tasks, and both against the original model."""

SUITE = "accuracy"  # of the runs that evaluate

"""Reference kernels in torch for machines without a GPU: they prove the pipeline, not speed."""

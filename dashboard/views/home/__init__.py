"""Home: what needs a decision, then the trend of each kernel, then the coverage of runs."""

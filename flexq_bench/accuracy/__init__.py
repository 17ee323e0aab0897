"""Accuracy: perplexity and tasks of a model under each scheme, compared with the original model.

An Evaluator (`evaluator`) executes an EvaluationPlan (`plan`); each number is a MetricResult, and
`difference` compares two of them (`results`). `setup` prepares a run, `records` stores its results,
`ray_evaluation` evaluates on a Ray cluster.
"""

SUITE = "accuracy"  # suite name of runs of `accuracy`

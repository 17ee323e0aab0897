"""Comparison of everything in a model's folder, other than its weights, with the original's.

The comparison is by meaning: settings through the classes of the installed transformers, tokenizers
and chat templates by what they return.
"""

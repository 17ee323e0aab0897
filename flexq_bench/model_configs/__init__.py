"""Configurations of Hugging Face models, and the linear layers that they describe."""

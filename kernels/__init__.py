"""How it is computed: number formats, CUDA sources, launchers, references, registry.

Hugging Face publishes a package of the same name that `transformers` probes by its version, so
this one defines none.
"""

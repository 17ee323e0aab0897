"""Engines behind an OpenAI-compatible interface: started, asked, judged in pairs."""

SUITE = "served"  # of the runs of `gate served`

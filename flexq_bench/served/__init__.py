"""Engines behind an OpenAI-compatible interface: started, asked, judged in pairs."""

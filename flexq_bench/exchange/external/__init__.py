"""Import of results of other tools as records: one module per format, registered in `formats.py`.

These results are judged by history alone, because both commits can't be measured interleaved here.
"""

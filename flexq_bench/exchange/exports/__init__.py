"""Export of records in the formats of other services, one module per format (`formats.py`)."""

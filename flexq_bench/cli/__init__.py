"""The command line, one module per verb: parse options, call the library, print.

No other package imports it. `app.py` is the composition root, which registers every verb, also
those that call `ci` and `dashboard`.
"""

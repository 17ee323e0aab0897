"""The command line, one file a verb: parse options, call the library, print. Nothing imports it.

`app.py` is the composition root: it registers every verb, also those whose work is done in `ci`
and `dashboard`.
"""

"""The pages, one package each.

Its `page` module has `page()`, which Streamlit calls without arguments, and `as_page()`, which
returns the page's title and address. The folder is not named `pages`: Streamlit runs each file of
such a folder as a script of its own if its link is opened before the app.
"""

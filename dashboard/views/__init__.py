"""The pages, a package for each: in its `page` module `page()`, which Streamlit calls without
arguments, and `as_page()`, which returns the page's title and address.

The folder is not named `pages`: Streamlit takes each file of such a folder for a script of its own,
and shows that, bare, to whoever opens a link to it before anybody opened the app.
"""

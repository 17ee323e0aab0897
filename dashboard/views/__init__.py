"""The pages: `page()` is called by Streamlit with nothing, `as_page()` says where it is.

The folder is not named `pages`: Streamlit takes each file of such a folder for a script of its own,
and shows that, bare, to whoever opens a link to it before anybody opened the app.
"""

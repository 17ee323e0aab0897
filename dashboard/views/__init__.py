"""The pages, one package each.

The `page` module of a package has `page`, a page of `dashboard.pages`. The folder is not named
`pages`, because Streamlit would run each file of such a folder as a script if its link is opened
before the app.
"""

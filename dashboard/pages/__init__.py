"""The pages: one function each, called by Streamlit with nothing."""

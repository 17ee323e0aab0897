"""Streamlit app: pages and charts of the stored results."""

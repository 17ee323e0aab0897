"""The Streamlit app: pages and charts over the stored results."""

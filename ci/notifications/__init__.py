"""Notifications: events of nightly runs, gates and alerts, their subscriptions and delivery.

An event is written in the transaction that stores its cause (`events.py`, `db/outbox.py`).
`delivery.py` later looks up the subscriptions (`subscriptions.py`) and sends it (`channels.py`).
"""

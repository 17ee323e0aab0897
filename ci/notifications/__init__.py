"""Telling people: events of nights, gates and alerts, who subscribes to them, and how they go out.

Events are written in the transaction of what they tell of (`events.py`, `db/outbox.py`). Later
`delivery.py` finds who subscribes (`subscriptions.py`) and sends (`channels.py`).
"""

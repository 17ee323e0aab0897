"""Alert: one alert with its evidence, the history of its series, and the triage form."""

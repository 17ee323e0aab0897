"""Fleet: workers, unfinished runs, requests, quarantine and devices."""

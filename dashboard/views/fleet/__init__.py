"""Fleet: workers, runs under way, requests, quarantine and devices."""

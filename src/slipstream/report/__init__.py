"""``report.html``: one file from a run's records, opened from disk without a network."""

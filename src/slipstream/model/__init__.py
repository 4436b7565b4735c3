"""The model's side: loading, attention over segments, adapters."""

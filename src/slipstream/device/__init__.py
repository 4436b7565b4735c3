"""From a host batch to tensors on a device: packed-sequence metadata and the collator that builds it."""

"""Rows to tokens to packed batches, on the host: no device is touched here."""

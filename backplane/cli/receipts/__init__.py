"""The `receipts` commands."""

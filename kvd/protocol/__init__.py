"""The protocol: messages, their bytes, and the descriptions of dtypes and keys that both sides share."""

"""Snapshots as folders: a manifest, and safetensors parts with checksums."""

"""Placement of partitions: their leaders and backups."""

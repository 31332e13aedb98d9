"""Tables: values of many rows, of which each push and pull names a few."""

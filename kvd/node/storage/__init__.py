"""Files of nodes: the record of a scheduler, tables, and tensors."""

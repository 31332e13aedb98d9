"""Any pure function of JAX as a model. Imported only when it is asked for: kvd does not need JAX."""

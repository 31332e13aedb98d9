"""Any torch module as a model. Imported only when it is asked for: kvd does not need torch."""

"""Which layouts a run can have on a cluster, what each GPU would hold, and what each would cost. Arithmetic alone: no torch."""

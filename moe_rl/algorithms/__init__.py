"""What is optimised. table.py: the algorithms, and what each is made of. config.py: their settings. loss.py: the loss of a
policy, from one objective (a file each) and one aggregation. value.py: the loss of a value model. All pure: no collectives,
denominators passed in. table and config need no torch, so that settings are checked before anything starts."""
